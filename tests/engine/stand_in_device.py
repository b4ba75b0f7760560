"""The meta device stands in for an accelerator: shapes, precisions and devices are real, values there are none.

Under `StandIn` every operation is looked at. One that mixes the host's tensors with the device's fails, as it does on a
GPU; so does one whose result the host would have to wait for, and a write to what may still be on its way there. A
transfer to the host is counted and answered with values that the decode loop can go on with: tokens, confidences, sums
and scores as `propose` lays them out, drifts.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer

DEVICE = torch.device("meta")

# Whose result depends on values, so that a GPU's host waits for them.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "equal", "is_nonzero", "item"}

EMPTY = {"empty", "empty_like", "new_empty", "empty_strided"}  # memory that nobody fills


class MixedDevices(AssertionError):
    """An operation met tensors of the host and of the device."""


class HostWaits(AssertionError):
    """An operation gives the host a value that the device has not computed yet."""


class StandIn(TorchDispatchMode):
    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.random = torch.Generator().manual_seed(seed)
        self.transfers = 0  # to the host
        self.uploads = 0  # to the device
        self.launches: Counter[str] = Counter()  # operations on the device that do something, uploads aside
        self._sent: list[tuple[Tensor, Tensor]] = []  # copied since the host last waited, and as it was then
        self._joined: tuple[Tensor, list[int]] | None = None  # what was last put together, and how long each part is

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = list(_tensors((args, kwargs)))
        sources = {each.device.type for each in tensors}
        target = kwargs.get("device")
        if name in ("_to_copy", "to") and target is not None and sources == {"meta"} != {torch.device(target).type}:
            return self._to_host(tensors[0], kwargs.get("dtype"))
        if name == "copy_" and len(sources) > 1:
            assert args[0].device == DEVICE, "a transfer to the host that is none of ours"
            self.uploads += 1
            self._sent.append((args[1], args[1].clone()))
            return args[0]
        if len(sources) > 1:
            shapes = [(each.device.type, tuple(each.shape)) for each in tensors]
            raise MixedDevices(f"{func} mixes devices: {shapes}")
        if name in WAITING and "meta" in sources:
            raise HostWaits(str(func))
        result = func(*args, **kwargs)
        if target is not None and sources == {"cpu"} and torch.device(target) == DEVICE:
            self.uploads += 1
        elif sources == {"meta"} and name not in EMPTY and not _is_view(name, result, tensors, kwargs):
            self.launches[name] += 1
            if name == "cat":
                self._joined = (result, [len(each) for each in args[0]])
        return result

    def _to_host(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The values that the host is given, as it expects them."""
        self.transfers += 1
        assert all(torch.equal(here, sent) for here, sent in self._sent), "written while a copy may still read it"
        self._sent.clear()
        drifts = torch.rand(tensor.shape, generator=self.random, dtype=torch.float64)
        if self._joined is None or self._joined[0] is not tensor:  # drifts, in the middle of a forward
            return drifts.to(dtype or tensor.dtype)
        chosen, scores, *beside = self._joined[1]
        rows = chosen // 3
        tokens = torch.randint(4, self.config.vocab, (rows,), generator=self.random).double()
        made = (tokens, drifts[:rows], torch.zeros(rows).double(), -drifts[:scores].new_ones(scores))
        return torch.cat((*made, *(drifts[:count] for count in beside))).to(tensor.dtype)


def _is_view(name: str, result: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Another look at the same numbers: no kernel runs for it."""
    first = next(_tensors(result), None)
    if first is None or name.endswith("_") or "out" in kwargs:
        return False
    return first.untyped_storage()._cdata in {each.untyped_storage()._cdata for each in tensors}


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict):
        yield from _tensors(tuple(nested.values()))
    elif isinstance(nested, list | tuple):
        for each in nested:
            yield from _tensors(each)


def stand_in_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    return random_model(config, dtype=dtype, device=DEVICE)
