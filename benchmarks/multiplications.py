"""All multiplications of a shape, once: our kernel of float16 weights against FBGEMM's and oneDNN's packed float32.

Layer after layer, as a forward meets them, so that no weight stays in a cache; the ways take turns, in an order that is
reversed every time. Medians, in milliseconds; FBGEMM is left out where torch has none.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.measurement import store_measurement
from benchmarks.shapes import SHAPES
from stepsaver.engine.backends.cpu.weights import keep_halves, multiply_packed, pack
from stepsaver.engine.models.config import ModelConfig

MEASURED = Path(__file__).parent / "measured"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Multiply = Callable[[Tensor], Tensor]


def weights_of(config: ModelConfig) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Outputs and inputs of the maps of all layers, in order, and those of the head."""
    queries, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = [
        (queries + 2 * kv, config.hidden),
        (config.hidden, queries),
        (2 * config.mlp, config.hidden),
        (config.hidden, config.mlp),
    ]
    return layer * config.layers, (config.vocab, config.hidden)


def ours(weight: Tensor) -> Multiply:
    kept = keep_halves(weight, None, ())
    assert kept is not None
    whole = (0, weight.shape[0])
    return lambda x: kept.project(x, whole)


def fbgemm(weight: Tensor) -> Multiply:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def onednn(weight: Tensor) -> Multiply:
    packed = pack(weight.float())
    return lambda x: multiply_packed(x, packed)


WAYS: dict[str, Callable[[Tensor], Multiply]] = {"ours": ours, "fbgemm": fbgemm, "onednn": onednn}


def milliseconds(maps: list[tuple[Multiply, int]], inputs: dict[int, Tensor]) -> float:
    started = time.perf_counter()
    for multiply, width in maps:
        multiply(inputs[width])
    return 1000 * (time.perf_counter() - started)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M")
    parser.add_argument("--rows", type=int, action="append", help=f"may be repeated (default: {ROWS})")
    parser.add_argument("--way", choices=sorted(WAYS), action="append", help="may be repeated (default: all)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--store", action="store_true", help="keep the table for the documents")
    options = parser.parse_args()
    layers, head = weights_of(SHAPES[options.shape])
    ways = {name: WAYS[name] for name in options.way or WAYS}
    maps: dict[str, list[tuple[Multiply, int]]] = {name: [] for name in ways}
    for outputs, width in (*layers, head):
        weight = (torch.randn(outputs, width) * 0.02).half()
        for name, made in maps.items():
            made.append((ways[name](weight), width))
    columns = ("rows", *(f"{name}, layers + head, ms" for name in maps))
    table: list[tuple[str, ...]] = []
    print("| " + " | ".join(columns) + " |")
    for rows in options.rows or ROWS:
        inputs = {width: torch.randn(rows, width) for width in {width for _, width in (*layers, head)}}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in maps}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for name in list(maps)[:: 1 if repeat % 2 else -1]:
                taken = milliseconds(maps[name][:-1], inputs), milliseconds(maps[name][-1:], inputs)
                times[name].append(taken)
        medians = ([median(column) for column in zip(*taken[1:], strict=True)] for taken in times.values())
        table.append((str(rows), *(f"{of_layers:.1f} + {of_head:.1f}" for of_layers, of_head in medians)))
        print("| " + " | ".join(table[-1]) + " |", flush=True)
    if options.store:
        command = f"python -m benchmarks.multiplications --shape {options.shape} --repeats {options.repeats} --store"
        store_measurement(MEASURED / f"multiplications_{options.shape}.json", command, columns, table)


if __name__ == "__main__":
    main()
