"""The backend whose small functions are compiled by torch, beside its products and attention."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepsaver.engine.backends.gpu import functions
from stepsaver.engine.backends.gpu.backend import Gpu
from stepsaver.engine.backends.packed import AttentionRows

if TYPE_CHECKING:
    from stepsaver.engine.cache import KeyValueCache
    from stepsaver.engine.models.transformer import HeadNorms

Function = Callable[..., Tensor]
SHAPES = 32  # that a function is compiled for; of others it runs as it is
OFTEN = 3  # forwards that met a shape before it is compiled: those of prompts seldom come again
PLACES = 512  # caches hold a multiple of so many places, so that those of most calls are of one shape


def compiled(function: Function) -> Function:
    """Every function rounds after each operation, as torch does, and multiplies and adds apart: the same numbers."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(function, fullgraph=True, dynamic=False, options={"emulate_precision_casts": True})


class Limited:
    """A function that is compiled for the shapes that it meets often, not for as many as there are."""

    def __init__(self, function: Function, compiler: Callable[[Function], Function]) -> None:
        self.function, self.compiled = function, compiler(function)
        self.shapes: set[Hashable] = set()
        self.met: dict[Hashable, set[int]] = {}  # the forwards that met a shape that is not compiled
        self.forward = 0

    def __call__(self, *given: Any) -> Tensor:
        shapes = tuple(_shape(each) for each in given)
        if shapes not in self.shapes:
            if len(self.shapes) == SHAPES:
                return self.function(*given)
            met = self.met.setdefault(shapes, set())
            met.add(self.forward)
            if len(met) < OFTEN:
                return self.function(*given)
            del self.met[shapes]
            self.shapes.add(shapes)
        return self.compiled(*given)


class Fused(Gpu):
    has_kernels = True  # so that a run of them is another run

    def __init__(self, compiler: Callable[[Function], Function] = compiled) -> None:
        self.add_and_norm = Limited(functions.add_and_norm, compiler)
        self.rotate = Limited(functions.rotate_and_store, compiler)
        self.fold = Limited(functions.fold, compiler)
        self.pack = Limited(functions.pack, compiler)
        self.silu = Limited(functions.silu_product, compiler)
        self.choose = Limited(functions.choose_token, compiler)

        self.functions = (self.add_and_norm, self.rotate, self.fold, self.pack, self.silu, self.choose)

    def begin(self) -> None:
        super().begin()
        for each in self.functions:
            each.forward += 1

    def places(self, wanted: int) -> int:
        return -(-wanted // PLACES) * PLACES

    def rms_norm(self, h_ND: Tensor, norm_weight: Tensor, eps: float, pending: Tensor | None = None) -> Tensor:
        if pending is None:
            return super().rms_norm(h_ND, norm_weight, eps)
        return self.add_and_norm(h_ND, pending, norm_weight, eps)

    def silu_product(self, gate_up: Tensor) -> Tensor:
        return self.silu(gate_up)

    def argmax(self, logits_NV: Tensor, mask_id: int) -> Tensor:
        return self.choose(logits_NV, mask_id)

    def attend(
        self, projected: Tensor, rows: AttentionRows, cache: "KeyValueCache", layer: int, norms: "HeadNorms | None"
    ) -> Tensor | None:
        attending = rows.attending
        if rows.places is None or attending is None:
            return super().attend(projected, rows, cache, layer, norms)
        parts = [*attending.alone, *attending.grouped]
        only = attending.grouped[0] if len(parts) == 1 and attending.grouped else None
        queries = self.rotate(
            projected,
            rows.rotation.turns,
            rows.rotation.query_scale,
            None if norms is None else norms.weight,
            0.0 if norms is None else norms.eps,
            cache.by_layer[layer],
            rows.places,
            None if only is None else only.chosen,
            None if len(parts) > 1 else 1 if only is None else only.samples,
        )
        heads, kv_heads = projected.shape[1] // cache.head_dim - 2 * cache.kv_heads, cache.kv_heads
        mixed = []
        for each in attending.alone:
            folded = queries if len(parts) == 1 else self.fold(queries[each.queries], None, 1, kv_heads)
            slots = slice(each.slot, each.slot + 1)
            count = folded.shape[2] * kv_heads // heads
            mask = None if each.mask is None else each.mask.folded(kv_heads, heads // kv_heads, count)
            mixed.append(self.mix(folded, *cache.read(layer, slots, each.length), mask))
        for group in attending.grouped:
            folded = queries if only is not None else self.fold(queries, group.chosen, group.samples, kv_heads)
            mask = group.mask.folded(kv_heads, heads // kv_heads, folded.shape[2] * kv_heads // heads)
            mixed.append(self.mix(folded, *cache.read(layer, group.slots, group.length), mask))
        return self.pack(mixed, attending.taken, heads)


def _shape(given: Any) -> Hashable:
    if isinstance(given, Tensor):
        return given.shape, given.stride()
    return tuple(map(_shape, given)) if isinstance(given, list) else given
