"""What a forward of the 7B asks of a device that does nothing, kind by kind: budgets that only get smaller."""

from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from benchmarks.shapes import SHAPES
from stepsaver.engine.backends.gpu import fused as gpu_fused
from stepsaver.engine.backends.gpu.fused import Function, Fused
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import Prompt, resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import _empty_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import ForwardRecord, Trace
from tests.engine.null_device import NAME, Counts, NullDevice, null_device
from tests.engine.test_card_code import KERNELS

pytestmark = pytest.mark.long

CONFIG = SHAPES["7B"]
FOUR_RULES = ("window:refresh=block", "trim:level=changed", "suffix_dropout", "partial_commit")


def denoising(*rules: str) -> Decoder:
    return Denoise(Fixed(2), tuple(map(parse_rule, rules)))


DECODERS = {
    "plain": denoising(),
    "four rules": denoising(*FOUR_RULES),
    "layer_reuse": denoising("layer_reuse:k=2,layers=middle"),
    "autoregressive": parse_decoder("autoregressive"),
    "drafts of 16": parse_decoder("speculative:positions=0,span=16"),
    "24 positions of branches": parse_decoder("speculative:positions=24"),
}
# The most launches of any forward, prefills apart, and of any prefill; by decoder and batch size.
BUDGETS = {
    ("plain", 1): (531, 532),
    ("plain", 16): (777, 867),
    ("four rules", 1): (531, 532),
    ("four rules", 16): (776, 867),
    ("layer_reuse", 1): (688, 532),
    ("layer_reuse", 16): (934, 867),
    ("autoregressive", 1): (467, 532),
    ("autoregressive", 16): (551, 887),
    ("drafts of 16", 1): (524, 513),
    ("drafts of 16", 16): (889, 867),
    ("24 positions of branches", 1): (524, 513),
    ("24 positions of branches", 16): (889, 867),
}


class Counting(Trace):
    """The counts of each forward, by whether it was a prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[bool, list[Counts]] = defaultdict(list)
        self._before: Counts | None = None

    def add(self, record: ForwardRecord) -> None:
        super().add(record)
        now = null_device().counts()
        if self._before is not None:  # the first one has the table of rotations too
            self.counts[any(entry.kind == "prefill" for entry in record.entries)].append(now.since(self._before))
        self._before = now


@pytest.fixture(scope="module")
def model() -> Iterator[Transformer]:
    """The 7B in float16, in memory that is not there. What comes back are random tokens and confidences."""
    null_device()
    random, real = np.random.default_rng(0), torch.Tensor.cpu

    def download(tensor: torch.Tensor) -> torch.Tensor:
        here = real(tensor)
        count = len(tensor) // 3
        if tensor.device.type == NAME:
            here[:count] = torch.from_numpy(random.integers(4, 1000, count))
            here[count : 2 * count] = torch.from_numpy(random.random(count))
        return here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", download)
        yield _empty_model(CONFIG, torch.float16).to_empty(device=NAME).prepare()


def counts_of(model: Transformer, name: str, batch_size: int) -> tuple[list[Counts], list[Counts]]:
    """Of steps, and of prefills."""
    decoding = resolve_decoding(CONFIG, stop_ids=(), join="off")
    engine = Engine(model, decoder=DECODERS[name], batch_size=batch_size, decoding=decoding)
    prompts = [
        Prompt(tuple(range(3, 515 + 7 * place % 160)), max_new_tokens=40 + 4 * (place % 3))
        for place in range(2 * batch_size)
    ]
    trace = Counting()
    assert len(list(engine.generate(prompts, max_new_tokens=48, trace=trace))) == len(prompts)
    return trace.counts[False], trace.counts[True]


@pytest.mark.parametrize(("name", "batch_size"), BUDGETS)
def test_a_forward_stays_within_its_budget(model: Transformer, name: str, batch_size: int) -> None:
    steps, prefills = counts_of(model, name, batch_size)
    assert max(each.launches for each in steps) <= BUDGETS[name, batch_size][0]
    assert max(each.launches for each in prefills) <= BUDGETS[name, batch_size][1]
    assert {(each.uploads, each.downloads) for each in steps} == {(1, 1)}
    assert max(each.uploads for each in prefills) <= 2, "the second is where the buffer grows"


# With compiled functions, whose kernels `test_card_code.py` counts.
FUSED_BUDGETS = {
    ("plain", 1): 333,
    ("four rules", 1): 333,
    ("24 positions of branches", 1): 322,
    ("plain", 16): 471,
    ("24 positions of branches", 16): 547,
}


@pytest.mark.parametrize(("name", "batch_size"), FUSED_BUDGETS)
def test_compiled_functions_stay_within_a_smaller_budget(model: Transformer, name: str, batch_size: int) -> None:
    kernels = [0]

    def compiler(function: Function) -> Function:
        def on_the_meta_device(*given: Any) -> torch.Tensor:
            made = function(*tree_map_only(torch.Tensor, lambda each: each.to("meta"), given))
            kernels[0] += KERNELS[function.__name__]
            return torch.empty(made.shape, dtype=made.dtype, device=NAME)

        return on_the_meta_device

    fused = deepcopy(model)
    fused.fused = Fused(compiler)
    before = NullDevice.counts

    def counts(device: NullDevice) -> Counts:
        found = before(device)
        return found._replace(launches=found.launches + kernels[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_fused, "SHAPES", 1 << 20)  # as if all were compiled
        patch.setattr(gpu_fused, "OFTEN", 1)
        patch.setattr(NullDevice, "counts", counts)
        steps, _ = counts_of(fused.prepare(), name, batch_size)
    assert max(each.launches for each in steps) <= FUSED_BUDGETS[name, batch_size]
