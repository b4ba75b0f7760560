"""What planning and keeping deltas cost in a step where nothing is reused, on the 135M shape.

The first step of every block runs everything whatever the rules; its time is compared with and without them.
"""

import argparse
from statistics import median

import torch

from stepsaver.bench.shapes import SHAPES
from stepsaver.bench.speed import decode_once, random_prompts
from stepsaver.engine.decode.fixed import Fixed
from stepsaver.engine.decoding import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import random_model
from stepsaver.engine.reuse.rule import parse_rule
from stepsaver.engine.trace import Trace

RULES = (
    "layer_reuse:k=2,layers=first,mode=delta",
    "layer_reuse:k=2,layers=all,mode=delta",
    "previous_row:refresh=block",
    "trim:level=changed",
    "trim:level=drift",
    "adaptive_layers:probe=4",
)


def first_step_seconds(engine: Engine, prompts: list) -> float:
    trace = decode_once(engine, prompts, Trace())
    return median(
        record.seconds for record in trace.records if all(e.kind == "full" and e.step == 0 for e in record.entries)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    model = random_model(SHAPES["135M"], dtype=torch.float32)
    decoding = resolve_decoding(model.config, stop_ids=())
    batch = options.batch_size
    prompts = random_prompts(model, [32] * batch, [33] * batch)
    engines = {
        name: Engine(model, decode=Fixed(8), reuse=rules, max_batch=batch, decoding=decoding)
        for name, rules in {"none": (), **{text: (parse_rule(text),) for text in RULES}}.items()
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.repeats + 1):
        for name, engine in engines.items():
            seconds = first_step_seconds(engine, prompts)
            if turn:  # the first turn warms up
                times[name].append(seconds)
    for name in RULES:
        ratios = [ours / plain for ours, plain in zip(times[name], times["none"], strict=True)]
        middle, low, high = (100 * (value - 1) for value in (median(ratios), min(ratios), max(ratios)))
        print(f"{name}: {middle:+.1f} % [{low:+.1f}, {high:+.1f}]")
    print(f"first step of a block, batch {batch}, {options.repeats} repeats, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
