"""`stepsaver speed`: how fast the engine is here, against its multiplications alone and the machine's limit."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from stepsaver.engine.defaults import WEIGHTS
from stepsaver.engine.errors import UsageError, shown, unknown_name

if TYPE_CHECKING:  # torch takes seconds to import and `--help` does not need it
    from stepsaver.bench.machine.limit import StepTime
    from stepsaver.engine.models.transformer import Transformer

HELP = "speed of this machine: tokens/s, efficiency, and the share of the machine's limit"
SHAPES = ("135M", "0.5B")  # the larger ones take minutes
BATCH_SIZES = (1, 8)
MOST_BATCH, MOST_REPEATS, MOST_NEW_TOKENS = 1024, 100, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        action="append",
        metavar="S",
        help="135M, 0.5B, 1.5B or 7B (16 GB); may be repeated (default: the first two)",
    )
    default = ", ".join(map(str, BATCH_SIZES))
    parser.add_argument(
        "--batch-size", type=int, action="append", metavar="N", help=f"may be repeated (default: {default})"
    )
    parser.add_argument(
        "--weights", default=WEIGHTS, help="of float16 numbers: auto, float32 or float16 (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="of every sample, after 64 given ones (default: 64)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved repeats (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--refill", action="store_true", help="also measure continuous batching (135M, minutes)")
    parser.add_argument("--context", action="store_true", help="also measure contexts of 256, 1k and 4k (135M)")
    parser.add_argument(
        "--against",
        metavar="ENGINE",
        help="also run 1, 8 and 32 rows in another engine: llama.cpp (with llama-cpp-python installed)",
    )
    parser.add_argument("--rows", action="store_true", help="also measure what 1 to 1024 packed rows take")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    import torch

    from stepsaver.bench.identity import peak_memory
    from stepsaver.bench.machine.against_llama import NAME, load_module, measure_against_llama
    from stepsaver.bench.machine.bare import BareModel
    from stepsaver.bench.machine.limit import measure_machine
    from stepsaver.bench.machine.shapes import SHAPES as KNOWN
    from stepsaver.bench.machine.speed import Workload, measure_context, measure_efficiency, measure_refill
    from stepsaver.engine.models.linear import check_weights
    from stepsaver.engine.models.load import random_model
    from stepsaver.engine.other_work import OtherWork, not_idle, other_cores_now

    shapes = options.shape or SHAPES
    for shape in shapes:
        if shape not in KNOWN:
            raise unknown_name("shape", shape, KNOWN)
    batches = options.batch_size or BATCH_SIZES
    for batch in batches:
        _check_count("--batch-size", batch, MOST_BATCH)
    _check_count("--repeats", options.repeats, MOST_REPEATS)
    _check_count("--new-tokens", options.new_tokens, MOST_NEW_TOKENS)
    if options.against is not None:
        if options.against != NAME:
            raise unknown_name("engine", options.against, (NAME,))
        load_module()
    check_weights(options.weights, torch.float32, torch.device("cpu"))
    if options.threads is not None:
        _check_count("--threads", options.threads, os.cpu_count() or 1)
        torch.set_num_threads(options.threads)
    before = other_cores_now()
    if note := not_idle(before):
        print(f"note: {note}", file=sys.stderr)
    others = OtherWork()
    machine = measure_machine()
    document: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "weights": options.weights,
        "device": "cpu",
        "machine": machine._asdict(),
        "other_cores": {"before": before},
    }
    if not options.json:
        print(
            f"this machine reads {machine.bytes_per_s / 1e9:.1f} GB/s "
            f"and multiplies {machine.flops_per_s / 1e9:.0f} GFLOP/s"
        )
    for shape in shapes:
        model = random_model(KNOWN[shape], dtype=torch.float32, weights=options.weights, stored=torch.float16)
        bare = BareModel(model)
        for batch in batches:
            measured = measure_efficiency(
                model, bare, machine, Workload(batch, new_tokens=options.new_tokens), options.repeats
            )
            measured["peak_memory_bytes"] = peak_memory(model.device)
            document.setdefault("efficiency", []).append({"shape": shape} | measured)
            if not options.json:
                _print_efficiency(shape, measured)
        if options.against is not None:
            compared = measure_against_llama(model, options.repeats)
            document.setdefault("against", []).extend({"shape": shape, "engine": NAME} | each for each in compared)
        if options.rows:
            document.setdefault("rows", []).append({"shape": shape} | _measure_rows(model, options))
        del bare  # before the next model is made
        if shape == "135M" and options.context:
            document["context"] = measure_context(model, options.repeats)
        if shape == "135M" and options.refill:
            document["refill"] = measure_refill(model, options.repeats)
    document["other_cores"]["during"] = during = others.cores()
    if not not_idle(before) and (note := not_idle(during)):
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(document, default=_as_json))
    else:
        _print_rest(document)
    return 0


def _measure_rows(model: "Transformer", options: argparse.Namespace) -> dict[str, Any]:
    """Measures the row costs that predictions are made from, and prints them unless JSON is wanted."""
    from stepsaver.bench.measure_rows import measure_row_costs
    from stepsaver.report.machine_blocks import COLUMNS, costs_rows, costs_text
    from stepsaver.report.tables import plain_table

    costs = measure_row_costs(model)
    if not options.json:
        print(f"milliseconds by rows: {costs_text(costs)}")
        lines = [(str(rows), *(f"{1000 * each:.3g}" for each in seconds)) for rows, *seconds in costs_rows(costs)]
        print(plain_table(lines, COLUMNS), flush=True)
    return costs.as_json() | {"forward_rows": costs.forward_rows}


def _check_count(option: str, given: int, most: int) -> None:
    if not 1 <= given <= most:
        raise UsageError(f"{option} {shown(given)} is not from 1 to {most}")


def _as_json(value: Any) -> dict[str, float]:
    assert is_dataclass(value)
    assert not isinstance(value, type)
    return asdict(value)


def _print_efficiency(shape: str, measured: dict[str, Any]) -> None:
    print(
        f"{shape} batch {measured['batch']}: efficiency {measured['efficiency']}, "
        f"{measured['tokens_per_s']} tokens/s, {measured['forwards_per_s']} forwards/s, "
        f"peak memory {measured['peak_memory_bytes'] / 1e9:.1f} GB"
    )
    _print_steps("without rules", measured["steps"])
    print(f"  {' and '.join(measured['rules'])}: {measured['tokens_per_s_with_rules']} tokens/s")
    _print_steps("with rules", measured["steps_with_rules"])


def _print_steps(which: str, steps: "Mapping[str, StepTime]") -> None:
    for kind, step in steps.items():
        print(
            f"  {which}, {kind}: {step.milliseconds:.1f} ms, {step.share:.2f} of the limit "
            f"({step.limit_milliseconds:.1f} ms by {step.limited_by})",
            flush=True,
        )


def _print_rest(document: dict[str, Any]) -> None:
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
