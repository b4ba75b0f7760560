"""The time of the bare matrix multiplications that a decode needs: the limit that efficiency is measured against.

For every forward of a trace this runs its multiplications, layer by layer on the model's own weights, and nothing else:
no norms, no attention over the context, no caches. Each multiplication uses the fastest layout of those tried.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.backends.backend import Slice
from stepsaver.engine.backends.cpu.weights import can_pack, multiply_packed, pack
from stepsaver.engine.models.linear import Linear
from stepsaver.engine.models.transformer import Layer, Transformer
from stepsaver.engine.trace import ForwardRecord

Multiply = Callable[[Tensor], Tensor]

ROOM_FOR_COPIES = 1 << 29  # weights of a model; five float32 copies of as many take about 10 GB


class ForwardShape(NamedTuple):
    rows: int
    head_rows: int


class Layouts(NamedTuple):
    """One weight, laid out in every way that is tried."""

    by_name: dict[str, Multiply]
    inputs: int


def forward_shape(record: ForwardRecord) -> ForwardShape:
    """Returns the shape of a forward without reuse."""
    return ForwardShape(sum(entry.rows for entry in record.entries), sum(entry.head_rows for entry in record.entries))


def layouts(kept: Linear, rows: Slice | None = None, *, others: bool) -> Layouts:
    """Returns a map as the model keeps it, or some rows of it; with `others`, also random float32 ones of its shape."""
    found: dict[str, Multiply] = {"as kept": partial(kept.project, rows=rows)}
    if others:
        first, last = rows or (0, kept.out_features)
        weight = torch.randn(last - first, kept.in_features)
        transposed = weight.t().contiguous()
        found["linear"] = lambda x: F.linear(x, weight)
        found["rows by transposed"] = lambda x: x @ transposed
        found["weight by columns"] = lambda x: weight @ x.t()
        if can_pack():
            packed = pack(weight)
            found["packed"] = lambda x: multiply_packed(x, packed)
    return Layouts(found, kept.in_features)


@dataclass
class BareModel:
    """The maps of a model in all layouts, and which layout is fastest for which number of rows.

    Other layouts than the model's own are copies, which only small models have room for.
    """

    model: Transformer
    roles: dict[str, list[Layouts]] = field(init=False)
    fastest: dict[tuple[str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = self.model.kept
        laid_out = partial(layouts, others=kept.float16 + kept.full < ROOM_FOR_COPIES)
        layers = [layer for layer in self.model.layers if isinstance(layer, Layer)]
        last = layers[-1].attention
        self.roles = {
            "qkv": [laid_out(layer.attention.qkv) for layer in layers[:-1]],
            "output": [laid_out(layer.attention.output) for layer in layers],
            "gate_up": [laid_out(layer.mlp.gate_up) for layer in layers],
            "down": [laid_out(layer.mlp.down) for layer in layers],
            "last keys and values": [laid_out(last.qkv, last.kv_rows)],
            "last queries": [laid_out(last.qkv, last.query_rows)],
            "head": [laid_out(self.model.head)],
        }

    @torch.inference_mode()
    def seconds(self, shape: ForwardShape) -> float:
        """Runs one forward's multiplications once, and returns the seconds."""
        plan = [self._chosen(role, index, rows) for role, index, rows in self._sequence(shape) if rows]
        started = time.perf_counter()
        for multiply, x in plan:
            multiply(x)
        return time.perf_counter() - started

    def _sequence(self, shape: ForwardShape) -> list[tuple[str, int, int]]:
        """Returns role, layer and rows of every multiplication, in the order of the forward."""
        last = len(self.roles["output"]) - 1
        sequence: list[tuple[str, int, int]] = []
        for index in range(last):
            sequence += [(role, index, shape.rows) for role in ("qkv", "output", "gate_up", "down")]
        sequence += [("last keys and values", 0, shape.rows), ("last queries", 0, shape.head_rows)]
        sequence += [(role, last, shape.head_rows) for role in ("output", "gate_up", "down")]
        return [*sequence, ("head", 0, shape.head_rows)]

    def _chosen(self, role: str, index: int, rows: int) -> tuple[Multiply, Tensor]:
        name = self.fastest.get((role, rows)) or self._find_fastest(role, rows)
        weight = self.roles[role][index]
        return weight.by_name[name], torch.randn(rows, weight.inputs)

    def _find_fastest(self, role: str, rows: int, repeats: int = 5) -> str:
        weights = self.roles[role]
        x = torch.randn(rows, weights[0].inputs)
        times: dict[str, list[float]] = {name: [] for name in weights[0].by_name}
        for _ in range(repeats):
            for name, seconds in times.items():
                started = time.perf_counter()
                for weight in weights:
                    weight.by_name[name](x)
                seconds.append(time.perf_counter() - started)
        self.fastest[role, rows] = min(times, key=lambda name: median(times[name]))
        return self.fastest[role, rows]
