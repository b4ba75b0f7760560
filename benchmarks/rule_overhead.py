"""What planning and keeping deltas cost in a step where nothing is reused, on the 135M shape.

The first step of every block runs everything whatever the rules. Samples of one such step are decoded with a rule and
without, turn about, and the two are compared pair by pair: the machine changes speed, but not within half a second.
"""

import argparse
from statistics import median

import torch
from scipy.stats import binom

from benchmarks.shapes import SHAPES
from stepsaver.bench.limit import decode_once, random_prompts
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import random_model
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace

RULES = (
    "layer_reuse:k=2,layers=first,mode=delta",
    "layer_reuse:k=2,layers=all,mode=delta",
    "window:refresh=block",
    "trim:level=changed",
    "trim:level=drift",
    "adaptive_layers:probe=4",
)


def first_step_seconds(engine: Engine, prompts: list) -> float:
    """The prompts are shorter than a block and one token is wanted: there is no other forward."""
    trace = decode_once(engine, prompts, Trace())
    assert trace.forwards == 1
    return trace.decode_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="of steps with and without a rule")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated (default: 1, 8)")
    options = parser.parse_args()
    model = random_model(SHAPES["135M"], dtype=torch.float32)
    decoding = resolve_decoding(model.config, stop_ids=())
    print("| batch | rule | time added, median (its 95 % interval) |")
    print("|---|---|---|")
    for batch in options.batch_size or (1, 8):
        prompts = random_prompts(model, [8] * batch, [1] * batch)
        plain, *engines = (
            Engine(model, decoder=Denoise(Fixed(8), rules), batch_size=batch, decoding=decoding)
            for rules in ((), *((parse_rule(text),) for text in RULES))
        )
        ratios: dict[str, list[float]] = {text: [] for text in RULES}
        for turn in range(options.pairs + 1):
            for text, engine in zip(RULES, engines, strict=True):
                pair = (plain, engine) if turn % 2 else (engine, plain)
                seconds = {each: first_step_seconds(each, prompts) for each in pair}
                if turn:  # the first turn warms up
                    ratios[text].append(seconds[engine] / seconds[plain])
        for text, found in ratios.items():
            low, high = binom.ppf([0.025, 0.975], len(found), 0.5).astype(int)
            ordered = sorted(found)
            middle, low, high = (100 * (value - 1) for value in (median(found), ordered[low], ordered[high]))
            print(f"| {batch} | `{text}` | {middle:+.1f} % ({low:+.1f} to {high:+.1f}) |", flush=True)


if __name__ == "__main__":
    main()
