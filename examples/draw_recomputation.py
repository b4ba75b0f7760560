"""Draws docs/images/recomputation.svg: which positions of a block each forward computes, from a trace.

A position is computed again where its token is the one that it was last computed with. One word problem, the embedded
model, threshold 0.9; without rules and with.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import stepsaver
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.engine import Engine
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.evaluation.encoding import encode_prompt
from stepsaver.report.trace_data import Frame, TraceRecorder

PROMPT = "Tom has 12 pens. Tom buys 9 more. Ann has 3 more pens than Tom. How many pens does Ann have?"
RULES = ("window:refresh=block", "trim:level=changed", "suffix_dropout")
CELL, GAP, TOP = 9, 40, 58
COLORS = {"new": "#2f6fb0", "again": "#f0a04b", "not": "#eceff3"}


def rows_of(ranges: str) -> set[int]:
    """`8-15,20` as a set."""
    if ranges == "none":
        return set()
    ends = (part.partition("-") for part in ranges.split(","))
    return {row for first, _, last in ends for row in range(int(first), int(last or first) + 1)}


def block_frames(model: stepsaver.Model, rules: tuple[str, ...]) -> list[Frame]:
    """The frames of the answer's second block, which is decoded from its first row on; of the first if it is alone."""
    engine = Engine(
        model.network,
        decoder=Denoise(Threshold(0.9), tuple(map(parse_rule, rules))),
        batch_size=1,
        decoding=model.opened.decoding,
    )
    recorder = TraceRecorder(engine)
    ids = encode_prompt(model.opened.tokenizer, PROMPT, chat=True)
    completions = list(engine.generate([ids], max_new_tokens=64, on_step=recorder))
    frames = [frame for frame in recorder.runs([ids], completions)[0]["frames"] if frame["kind"] != "prefill"]
    starts = sorted({frame["start"] for frame in frames})
    return [frame for frame in frames if frame["start"] == starts[min(1, len(starts) - 1)]]


def states(frames: list[Frame]) -> Iterator[list[str]]:
    """Of every forward and row: computed with a new token, computed again, or not computed."""
    last: dict[int, int] = {}
    for frame in frames:
        ran = rows_of(frame["layers"][0].keys_values) if frame["layers"] else set()
        tokens = frame["tokens"]
        yield ["not" if row not in ran else "again" if last.get(row) == tokens[row] else "new" for row in range(32)]
        last |= {row: tokens[row] for row in ran}


def panel(title: str, grid: list[list[str]], left: int) -> Iterator[str]:
    computed = sum(state != "not" for line in grid for state in line)
    again = sum(state == "again" for line in grid for state in line)
    yield f'<text x="{left}" y="18" class="title">{title}</text>'
    yield f'<text x="{left}" y="36">{computed} positions computed, {again} of them again</text>'
    for y, line in enumerate(grid):
        for x, state in enumerate(line):
            yield (
                f'<rect x="{left + x * CELL}" y="{TOP + y * CELL * 1.5:g}" width="{CELL - 1}" '
                f'height="{CELL * 1.5 - 2:g}" fill="{COLORS[state]}"/>'
            )


def drawing(panels: dict[str, list[list[str]]]) -> str:
    width = len(panels) * 32 * CELL + (len(panels) - 1) * GAP + 20
    bottom = TOP + max(map(len, panels.values())) * CELL * 1.5
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 44:g}" width="{width}" role="img">',
        "<style>text{font:12px sans-serif;fill:#57606a}.title{font-weight:bold}</style>",
        f'<rect width="{width}" height="{bottom + 44:g}" fill="#fff"/>',
    ]
    for index, (title, grid) in enumerate(panels.items()):
        parts += panel(title, grid, 10 + index * (32 * CELL + GAP))
    legend = {"new": "computed with a new token", "again": "computed again, same token", "not": "not computed"}
    for index, (state, text) in enumerate(legend.items()):
        x = 10 + index * 200
        parts.append(f'<rect x="{x}" y="{bottom + 20:g}" width="10" height="10" fill="{COLORS[state]}"/>')
        parts.append(f'<text x="{x + 15}" y="{bottom + 29:g}">{text}</text>')
    note = "32 positions of a block from left to right, forwards from top to bottom"
    parts.append(f'<text x="10" y="{TOP - 6}">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[1] / "docs" / "images" / "recomputation.svg"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    model = stepsaver.load("embedded")
    panels = {"without rules": (), "window, TRIM and suffix dropout": RULES}
    grids = {title: list(states(block_frames(model, rules))) for title, rules in panels.items()}
    options.out.write_text(drawing(grids), encoding="utf-8")


if __name__ == "__main__":
    main()
