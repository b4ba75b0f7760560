"""The time of the bare matrix multiplications that a decode needs: the limit that efficiency is measured against.

For every forward of a trace this runs what its plan runs, layer by layer on the model's own weights, and nothing else:
no norms, no attention over the context, no caches. Each multiplication uses the fastest layout of those tried.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.models.layouts import can_pack, multiply_packed, pack
from stepsaver.engine.models.transformer import Layer, Transformer
from stepsaver.engine.trace import ForwardRecord

Multiply = Callable[[Tensor], Tensor]


class ForwardShape(NamedTuple):
    rows: int
    head_rows: int


class Layouts(NamedTuple):
    """One weight, laid out in every way that is tried."""

    by_name: dict[str, Multiply]
    inputs: int


def forward_shape(record: ForwardRecord) -> ForwardShape:
    """The shape of a forward without reuse."""
    return ForwardShape(sum(entry.rows for entry in record.entries), sum(entry.head_rows for entry in record.entries))


def layouts(weight: Tensor) -> Layouts:
    transposed = weight.t().contiguous()
    found: dict[str, Multiply] = {
        "linear": lambda x: F.linear(x, weight),
        "rows by transposed": lambda x: x @ transposed,
        "weight by columns": lambda x: weight @ x.t(),
    }
    if can_pack(weight):
        packed = pack(weight)
        found["packed"] = lambda x: multiply_packed(x, packed)
    return Layouts(found, weight.shape[1])


@dataclass
class BareModel:
    """The weights of a model in all layouts, and which layout is fastest for which number of rows."""

    model: Transformer
    roles: dict[str, list[Layouts]] = field(init=False)
    fastest: dict[tuple[str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = [layer for layer in self.model.layers if isinstance(layer, Layer)]
        last = layers[-1].attention
        self.roles = {
            "qkv": [layouts(layer.attention.qkv.weight) for layer in layers[:-1]],
            "output": [layouts(layer.attention.output.weight) for layer in layers],
            "gate_up": [layouts(layer.mlp.gate_up.weight) for layer in layers],
            "down": [layouts(layer.mlp.down.weight) for layer in layers],
            "last keys and values": [layouts(last.qkv.weight[slice(*last.kv_rows)])],
            "last queries": [layouts(last.qkv.weight[slice(*last.query_rows)])],
            "head": [layouts(self.model.head.weight)],
        }

    @torch.inference_mode()
    def seconds(self, shape: ForwardShape) -> float:
        """The time of one forward's multiplications, once."""
        plan = [self._chosen(role, index, rows) for role, index, rows in self._sequence(shape) if rows]
        started = time.perf_counter()
        for multiply, x in plan:
            multiply(x)
        return time.perf_counter() - started

    def _sequence(self, shape: ForwardShape) -> list[tuple[str, int, int]]:
        """Role, layer and rows of every multiplication, in the order of the forward."""
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
