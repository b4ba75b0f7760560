"""`stepsaver speed`: what the engine reaches on this machine, against the limit of its matrix multiplications."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from stepsaver.engine.errors import UsageError, unknown_name

HELP = "speed of this machine: tokens/s, and efficiency against the matrix-multiplication limit"
BATCH_SIZES = (1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", metavar="S", help="135M or 0.5B; may be repeated (default: both)")
    default = ", ".join(map(str, BATCH_SIZES))
    parser.add_argument(
        "--batch-size", type=int, action="append", metavar="N", help=f"may be repeated (default: {default})"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved repeats (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--refill", action="store_true", help="also measure continuous batching (135M, minutes)")
    parser.add_argument("--context", action="store_true", help="also measure contexts of 256, 1k and 4k (135M)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    import torch

    from stepsaver.bench.bare import BareModel
    from stepsaver.bench.shapes import SHAPES
    from stepsaver.bench.speed import Workload, measure_context, measure_efficiency, measure_refill
    from stepsaver.engine.models.load import random_model

    shapes = options.shape or list(SHAPES)
    for shape in shapes:
        if shape not in SHAPES:
            raise unknown_name("shape", shape, SHAPES)
    batches = options.batch_size or BATCH_SIZES
    if min(batches) < 1 or options.repeats < 1:
        raise UsageError("batch sizes and repeats are positive numbers")
    if options.threads:
        torch.set_num_threads(options.threads)
    document: dict[str, Any] = {"threads": torch.get_num_threads(), "dtype": "float32", "device": "cpu"}
    for shape in shapes:
        model = random_model(SHAPES[shape], dtype=torch.float32)
        bare = BareModel(model)
        for batch in batches:
            measured = measure_efficiency(model, bare, Workload(batch), options.repeats)
            document.setdefault("efficiency", []).append({"shape": shape} | measured)
            if not options.json:
                _print_efficiency(shape, measured)
        del bare
        if shape == "135M" and options.context:
            document["context"] = measure_context(model, options.repeats)
        if shape == "135M" and options.refill:
            document["refill"] = measure_refill(model, options.repeats)
    if options.json:
        print(json.dumps(document, default=_as_json))
    else:
        _print_rest(document)
    return 0


def _as_json(value: Any) -> dict[str, float]:
    from stepsaver.bench.speed import Spread

    assert isinstance(value, Spread)
    return asdict(value)


def _print_efficiency(shape: str, measured: dict[str, Any]) -> None:
    times = ", ".join(f"{kind} {value:.1f} ms" for kind, value in measured["milliseconds"].items())
    print(
        f"{shape} batch {measured['batch']}: efficiency {measured['efficiency']}, "
        f"{measured['tokens_per_s']} tokens/s, {measured['forwards_per_s']} forwards/s ({times})",
        flush=True,
    )


def _print_rest(document: dict[str, Any]) -> None:
    for row in document.get("context", ()):
        print(f"context {row['context']}: full {row['full']:.1f} ms, sub {row['sub']:.1f} ms")
    if "refill" in document:
        refill = document["refill"]
        print(
            f"{refill['prompts']} prompts, batch {refill['batch']}: {refill['tokens_per_s']} tokens/s with refill, "
            f"{refill['tokens_per_s_without_refill']} without, ratio {refill['ratio']}, "
            f"places filled {refill['places_filled']:.3f}"
        )
    print(f"medians [smallest, largest] of interleaved repeats; {document['threads']} threads, float32, CPU")
