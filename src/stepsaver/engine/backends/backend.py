"""The operations of a layer, as torch has them for every device and precision; a backend has faster ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.backends import torch_attention
from stepsaver.engine.backends.packed import AttentionRows, PackedRun
from stepsaver.engine.models.rope import rotate

if TYPE_CHECKING:
    from stepsaver.engine.cache import DeltaCache, KeyValueCache
    from stepsaver.engine.defaults import Weights
    from stepsaver.engine.models.transformer import HeadNorms, Transformer

Slice = tuple[int, int]  # rows of a weight, which are columns of the result


class Weight:
    """The weight of a linear map in another layout than torch's, which it replaces."""

    halves = 0  # how many of its numbers are kept in 16 bits
    rounded = 0  # how many of these are rounded

    def project(self, x: Tensor, rows: Slice) -> Tensor:
        """The products with some rows of the weight, and their bias."""
        raise NotImplementedError

    def look_up(self, rows: Tensor) -> Tensor:
        """Rows of the weight, as an embedding returns them. Only of weights in 16 bits."""
        raise NotImplementedError


Index = NDArray[np.int64]


class Upload:
    """How the index tensors of a forward reach the device. Where that is the host, they are there."""

    def tensor(self, array: Index) -> Tensor:
        """The numbers on the device, once they are sent."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A tensor to be filled here before it is sent, and the same one there."""
        made = torch.empty(*shape, dtype=dtype)
        return made, made

    def send(self) -> None:
        """Everything since the last time."""


class Layers(Protocol):
    """All layers of a model, ready to run in one call."""


class Backend:
    """Torch's operations. A subclass replaces any of them; results differ by rounding only."""

    has_kernels = False  # whether operations of our own serve

    def upload(self, device: torch.device) -> Upload:
        """For one forward."""
        return Upload()

    def begin(self) -> None:
        """Before every forward."""

    def wait(self, device: torch.device) -> None:
        """Until everything that was asked of a device is done."""

    def places(self, wanted: int) -> int:
        """How many places of a slot a cache has where so many are wanted."""
        return wanted

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a cache."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def pack_weight(
        self, weight: Tensor, bias: Tensor | None, slices: Sequence[Slice], choice: "Weights", *, is_large: bool
    ) -> Weight | None:
        """A weight that will not change any more in the fastest layout, for products with it and with its slices.
        `is_large`: it does not stay in a processor's caches. None: torch's own layout.
        """
        return None

    def pack_layers(self, model: "Transformer") -> Layers | None:
        """What `run_layers` needs to run the layers of a model. None: it cannot."""
        return None

    def rms_norm(self, h_ND: Tensor, norm_weight: Tensor, eps: float, pending: Tensor | None = None) -> Tensor:
        """The normed rows. A residual that is pending is first added to them in place."""
        if pending is not None:
            h_ND += pending
        return F.rms_norm(h_ND, (h_ND.shape[-1],), norm_weight, eps)

    def silu_product(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, of rows that hold first the gate and then up."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def argmax(self, logits_NV: Tensor, mask_id: int) -> Tensor:
        """[3, N] in float64: the best token but `mask_id`, its probability among all, and the sum of the logits, which
        is finite if all are.
        """
        sums, probabilities = logits_NV.sum(-1), logits_NV.softmax(-1)
        if mask_id < 0:
            tokens = logits_NV.argmax(-1)
        else:
            mask_logits = logits_NV[:, mask_id].clone()
            logits_NV[:, mask_id] = -torch.inf
            tokens = logits_NV.argmax(-1)
            logits_NV[:, mask_id] = mask_logits
        confidence = probabilities.gather(-1, tokens[:, None])[:, 0]
        return torch.stack((tokens.double(), confidence.double(), sums.double()))

    def copy_rows(self, x_ND: Tensor, stored: Tensor, indices: Tensor) -> None:
        """Puts each row at its index among the rows of `stored`; no two have the same."""
        stored.index_copy_(0, indices, x_ND)

    def attends(self, head_dim: int, length: int) -> bool:
        """Whether this backend attends to a context of `length` rows by itself, as `Attending.segments`."""
        return False

    def attend(
        self, projected: Tensor, rows: AttentionRows, cache: "KeyValueCache", layer: int, norms: "HeadNorms | None"
    ) -> Tensor | None:
        """Norms and rotates packed rows, stores their keys and values, and attends: [N, H E], or None without queries.

        A row holds its queries, if it attends, and after them its keys and values, if it has places for them. The
        caller must not use `projected` afterwards: it may be rotated in place.
        """
        heads_NHE = projected.view(len(projected), -1, cache.head_dim)
        written = 0 if rows.places is None else cache.kv_heads
        queries = heads_NHE.shape[1] - 2 * written
        self.rotate_and_store(heads_NHE, queries, rows, cache, layer, norms)
        if rows.attending is None:
            return None
        return torch_attention.attend(heads_NHE[:, :queries], cache, layer, rows.attending)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of [S, K, R, E] to [S, K, L, E]; the mask is added to the scores [S, K, R, L]."""
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    def rotate_and_store(
        self,
        heads_NHE: Tensor,
        queries: int,
        rows: AttentionRows,
        cache: "KeyValueCache",
        layer: int,
        norms: "HeadNorms | None",
    ) -> None:
        """Queries and keys are turned in place, both in the same operations; keys and values go to their places."""
        keys = 0 if rows.places is None else cache.kv_heads
        turned = heads_NHE[:, : queries + keys]
        normed = turned if norms is None else norms(turned, queries)
        rotate(normed, rows.rotation, out=turned)
        if rows.rotation.query_scale is not None:
            heads_NHE[:, :queries] *= rows.rotation.query_scale[:, None, None]
        if rows.places is not None:  # by the cache's own dimensions: a compiler copies what is written through a view
            slots, positions = rows.places.unbind(-1)
            cache.by_layer[layer][slots, :, positions] = heads_NHE[:, queries:]

    def run_layers(
        self,
        layers: Layers,
        span: range,
        h_ND: Tensor,
        run: PackedRun,
        cache: "KeyValueCache",
        deltas: "DeltaCache | None",
    ) -> Tensor | None:
        """Runs consecutive layers in one call and returns the rows that go on; `h_ND` may be changed in place. None: it
        cannot, and nothing has changed.
        """
        return None


TORCH = Backend()
