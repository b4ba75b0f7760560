"""What every rule saves on the random-weight 135M shape with a fixed number of steps: time alone, no accuracy.

Two paces: two rows a step, and steps in the mix of a published trace of the 7B model (`AsThe7B`). At batch 1 the
weights are read whatever the rows, so forwards and whole layers count; in batches rows count. Medians of repeats that
are interleaved with the baseline in one process.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import ClassVar

import torch

from benchmarks.efficiency import spread
from benchmarks.measurement import store_measurement
from benchmarks.shapes import SHAPES
from stepsaver.bench.limit import decode_once, random_prompts
from stepsaver.bench.timings import predicted_seconds
from stepsaver.engine.curve import measure_curve
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import random_model
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.policies.policy import Candidates, Policy, by_confidence
from stepsaver.engine.positions import Positions
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace
from stepsaver.engine.view import StepView

MEASURED = Path(__file__).parent / "measured"
COLUMNS = ("batch", "pace", "rules", "speed-up, median [smallest, largest]", "predicted")
WINDOW = ("window:refresh=block", "trim:level=changed")
NEAR_LIGHT = (*WINDOW, "suffix_dropout", "partial_commit")
RULE_SETS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{
        f"{mode} k{k}_{layers}": (f"layer_reuse:k={k},layers={layers},mode={mode}",)
        for mode in ("output", "delta", "mlp")
        for k in (2, 3)
        for layers in ("first", "last")
    },
    "delta k2_first freeze": ("layer_reuse:k=2,layers=first,mode=delta,kv=freeze",),
    "window": WINDOW[:1],
    "trim": WINDOW[1:],
    "window + trim": WINDOW,
    "window + trim + mlp k2_first": (*WINDOW, "layer_reuse:k=2,layers=first,mode=mlp"),
    "window + trim + delta k2_first": (*WINDOW, "layer_reuse:k=2,layers=first,mode=delta"),
    "adaptive_layers 0.1": ("adaptive_layers:threshold=0.1",),
    "window + trim + near + light": NEAR_LIGHT,
    "window + trim + near + light, joined": NEAR_LIGHT,
    "none, joined": (),
}
JOINED = ", joined"  # forwards that may be one are: a prefill and the first step, a commit and the next first step


@dataclass(frozen=True)
class AsThe7B:
    """A sub-block of 8 rows in six steps, its first row in the second one, so that two of the six are full.

    Of a block's row-layers, full steps then are 62 %, sub-block steps 31 % and the commit 8 %. In a published trace of
    Fast-dLLM v2 7B they are 59, 33 and 8 %.
    """

    name: ClassVar[str] = "as_the_7b"

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        step = view.steps_in_sub_block
        ranked = [row for row, _ in by_confidence(candidates)]
        first = (view.sub_block & -view.sub_block).bit_length() - 1
        if first in ranked and (step == 0 or step == 1):
            ranked.remove(first)
            ranked.insert(0 if step == 1 else len(ranked), first)
        return sum(1 << row for row in ranked[: 1 if step < 4 else 2])


PACES: dict[str, Policy] = {"two rows a step": Fixed(2), "as the 7B": AsThe7B()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated (default: 1, 8)")
    parser.add_argument("--pace", choices=PACES, action="append", help="may be repeated (default: both)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", action="append", help="rule sets whose name contains this; may be repeated")
    parser.add_argument("--store", action="store_true", help="keep the table for the documents")
    options = parser.parse_args()
    # numbers of float16, as in a checkpoint: kept in 16 bits where the machine can
    model = random_model(SHAPES["135M"], dtype=torch.float32, stored=torch.float16)
    apart = resolve_decoding(model.config, stop_ids=(), join="off")
    joined = replace(apart, join="on")
    chosen = {
        name: tuple(map(parse_rule, rules))
        for name, rules in RULE_SETS.items()
        if name == "none" or not options.only or any(part in name for part in options.only)
    }
    print("| " + " | ".join(COLUMNS) + " |")
    table: list[tuple[str, ...]] = []
    for pace, batch in product(options.pace or PACES, options.batch_size or (1, 8)):
        curve = measure_curve(model, batch_size=batch)
        prompts = random_prompts(model, [64] * batch, [options.new_tokens] * batch)
        engines = {
            name: Engine(
                model,
                decoder=Denoise(PACES[pace], rules),
                batch_size=batch,
                decoding=joined if name.endswith(JOINED) else apart,
            )
            for name, rules in chosen.items()
        }
        # the first one of each warms up
        traces = {name: [decode_once(engine, prompts, Trace())] for name, engine in engines.items()}
        for _ in range(options.repeats):
            for name, engine in engines.items():
                traces[name].append(decode_once(engine, prompts, Trace()))
        plain = traces["none"]
        for name in chosen:
            ratios = [a.decode_seconds / b.decode_seconds for a, b in zip(plain[1:], traces[name][1:], strict=True)]
            base, ours = (predicted_seconds(curve, model.config, each[0].records) for each in (plain, traces[name]))
            table.append((str(batch), pace, name, str(spread(ratios)), f"{base / ours:.2f}"))
            print("| " + " | ".join(table[-1]) + " |", flush=True)
        milliseconds = 1000 * median(trace.decode_seconds / trace.forwards for trace in plain[1:])
        table.append((str(batch), pace, f"(a forward without reuse: {milliseconds:.1f} ms)", *[""] * 2))
        print("| " + " | ".join(table[-1]) + " |", flush=True)
    if options.store:
        command = f"python -m benchmarks.reuse_speed --repeats {options.repeats} --new-tokens {options.new_tokens}"
        chosen_by = "".join(f" --pace {pace!r}" for pace in options.pace or ())
        chosen_by += "".join(f" --only {part!r}" for part in options.only or ())
        store_measurement(MEASURED / "reuse_speed_135M.json", command + chosen_by + " --store", COLUMNS, table)


if __name__ == "__main__":
    main()
