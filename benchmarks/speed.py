"""How fast the engine is here, against its multiplications alone and against what the machine can read and multiply.

    python -m benchmarks.speed [--shape 135M --shape 7B] [--against llama.cpp]

Random weights of real shapes; medians of repeats that are interleaved with what they are compared with.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch

from benchmarks.against_llama import NAME, load_module, measure_against_llama
from benchmarks.bare import BareModel
from benchmarks.efficiency import Workload, measure_context, measure_efficiency, measure_refill
from benchmarks.shapes import SHAPES
from stepsaver.bench.identity import peak_memory
from stepsaver.bench.limit import StepTime, measure_machine
from stepsaver.cli import NOTHING_KEPT, OneLineParser, answered
from stepsaver.engine.defaults import KINDS_OF_WEIGHTS
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.machine import OtherWork, not_idle, other_cores_now
from stepsaver.engine.models.load import random_model

SMALL = ["135M", "0.5B"]  # the larger ones take minutes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m benchmarks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: the first two)")
    parser.add_argument("--batch-size", type=int, action="append", metavar="N", help="may be repeated (default: 1, 8)")
    parser.add_argument("--weights", default="auto", choices=KINDS_OF_WEIGHTS, help="how float16 numbers are kept")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="of every sample, after 64 given ones")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved repeats (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--refill", action="store_true", help="also measure continuous batching (135M, minutes)")
    parser.add_argument("--context", action="store_true", help="also measure contexts of 256, 1k and 4k (135M)")
    parser.add_argument("--against", choices=[NAME], help="also run 1, 8 and 32 positions in llama-cpp-python")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    options.shape, options.batch_size = options.shape or SMALL, options.batch_size or [1, 8]
    for batch in options.batch_size:
        _check_count("--batch-size", batch, 1024)
    _check_count("--repeats", options.repeats, 100)
    _check_count("--new-tokens", options.new_tokens, 4096)
    if options.threads is not None:
        _check_count("--threads", options.threads, os.cpu_count() or 1)
    return options


def _check_count(option: str, given: int, most: int) -> None:
    if not 1 <= given <= most:
        raise UsageError(f"{option} {shown(given)} is not from 1 to {most}")


def run(options: argparse.Namespace) -> int:
    if options.against:
        load_module()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    before = other_cores_now()
    if note := not_idle(before):
        print(f"note: {note}", file=sys.stderr)
    others = OtherWork()
    document = measured(options)
    document["other_cores"] = {"before": before, "during": others.cores()}
    if not not_idle(before) and (note := not_idle(document["other_cores"]["during"])):
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(document, default=_as_json))
    else:
        _print(document)
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    machine = measure_machine()
    document: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "weights": options.weights,
        "device": "cpu",
        "machine": machine._asdict(),
        "efficiency": [],
    }
    for shape in options.shape:
        model = random_model(SHAPES[shape], dtype=torch.float32, weights=options.weights, stored=torch.float16)
        bare = BareModel(model)
        for batch in options.batch_size:
            workload = Workload(batch, new_tokens=options.new_tokens)
            found = measure_efficiency(model, bare, machine, workload, options.repeats)
            memory = {"peak_memory_bytes": peak_memory(model.device)}
            document["efficiency"].append({"shape": shape} | found | memory)
        if options.against:
            compared = measure_against_llama(model, options.repeats)
            document.setdefault("against", []).extend({"shape": shape, "engine": NAME} | each for each in compared)
        del bare  # before the next model is made
        if shape == "135M" and options.context:
            document["context"] = measure_context(model, options.repeats)
        if shape == "135M" and options.refill:
            document["refill"] = measure_refill(model, options.repeats)
    return document


def _as_json(value: Any) -> dict[str, float]:
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return asdict(value)


def _print(document: dict[str, Any]) -> None:
    read, multiplied = document["machine"]["bytes_per_s"] / 1e9, document["machine"]["flops_per_s"] / 1e9
    print(f"this machine reads {read:.1f} GB/s and multiplies {multiplied:.0f} GFLOP/s")
    for row in document["efficiency"]:
        print(
            f"{row['shape']} batch {row['batch']}: efficiency {row['efficiency']}, {row['tokens_per_s']} tokens/s, "
            f"{row['forwards_per_s']} forwards/s, peak memory {row['peak_memory_bytes'] / 1e9:.1f} GB"
        )
        _print_steps("without rules", row["steps"])
        print(f"  {' and '.join(row['rules'])}: {row['tokens_per_s_with_rules']} tokens/s")
        _print_steps("with rules", row["steps_with_rules"])
    for row in document.get("against", ()):
        print(
            f"{row['shape']}, a forward of {row['rows']} rows: {row['ours_ms']:.1f} ms, {row['engine']} "
            f"{row['llama_cpp_ms']:.1f} ms, ratio {row['ratio']:.2f}"
        )
    for row in document.get("context", ()):
        print(f"context {row['context']}: full {row['full']:.1f} ms, sub {row['sub']:.1f} ms")
    if "refill" in document:
        refill = document["refill"]
        print(
            f"{refill['prompts']} prompts, batch {refill['batch']}: {refill['tokens_per_s']} tokens/s with refill, "
            f"{refill['tokens_per_s_without_refill']} without, ratio {refill['ratio']}, "
            f"slots filled {refill['slots_filled']:.3f}"
        )
    print(f"medians [smallest, largest] of interleaved repeats; {document['threads']} threads, float32, CPU")


def _print_steps(which: str, steps: Mapping[str, StepTime]) -> None:
    for kind, step in steps.items():
        print(
            f"  {which}, {kind}: {step.milliseconds:.1f} ms, {step.share:.2f} of the limit "
            f"({step.limit_milliseconds:.1f} ms by {step.limited_by})"
        )


def main(arguments: list[str] | None = None) -> int:
    return answered(lambda: run(parse(arguments)), lambda: NOTHING_KEPT)


if __name__ == "__main__":
    sys.exit(main())
