"""Whole decodes with weights of 16 bits and with the same numbers in float32, without rules and with them (135M shape).

The two take turns in one process, batch by batch; a ratio is the median of the ratios of neighbours.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.efficiency import fixed_engine, spread
from benchmarks.measurement import store_measurement
from benchmarks.shapes import SHAPES
from stepsaver.bench.limit import decode_once, random_prompts
from stepsaver.engine.defaults import Weights
from stepsaver.engine.models.load import random_model
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace

MEASURED = Path(__file__).parent / "measured"
COLUMNS = ("batch and rules", "16 bits, tokens/s", "float32, tokens/s", "ratio")
KINDS: tuple[Weights, Weights] = ("auto", "float32")
RULE_SETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "suffix_dropout, partial_commit": ("suffix_dropout:ahead=0", "partial_commit:settle=1"),
    "all": ("window:refresh=block", "trim:level=changed", "suffix_dropout:ahead=0", "partial_commit:settle=1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated (default: 1, 8)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--store", action="store_true", help="keep the table for the documents")
    options = parser.parse_args()
    models = {
        kind: random_model(SHAPES[options.shape], dtype=torch.float32, weights=kind, stored=torch.float16)
        for kind in KINDS
    }
    table: list[tuple[str, ...]] = []
    print("| " + " | ".join(COLUMNS) + " |")
    for batch in options.batch_size or (1, 8):
        for name, rules in RULE_SETS.items():
            parsed = tuple(map(parse_rule, rules))
            engines = {
                kind: fixed_engine(model, batch=batch, rows_per_step=2, rules=parsed) for kind, model in models.items()
            }
            rates: dict[Weights, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(options.repeats + 1):  # the first ones warm up
                for kind, engine in engines.items():
                    prompts = random_prompts(models[kind], [64] * batch, [options.new_tokens] * batch)
                    trace = decode_once(engine, prompts, Trace())
                    rates[kind].append(trace.tokens_generated / trace.decode_seconds)
            halves, floats = (spread(rates[kind][1:]) for kind in KINDS)
            ratio = spread([a / b for a, b in zip(rates["auto"][1:], rates["float32"][1:], strict=True)])
            table.append((f"batch {batch}, {name}", str(halves), str(floats), str(ratio)))
            print("| " + " | ".join(table[-1]) + " |", flush=True)
    if options.store:
        command = f"python -m benchmarks.kinds_of_weights --shape {options.shape} --repeats {options.repeats} --store"
        store_measurement(MEASURED / f"kinds_of_weights_{options.shape}.json", command, COLUMNS, table)


if __name__ == "__main__":
    main()
