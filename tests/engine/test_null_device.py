"""What a forward of the 7B asks of a device that does nothing, kind by kind: budgets that only get smaller."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.shapes import SHAPES
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
from tests.engine.null_device import NAME, Counts, null_device

pytestmark = pytest.mark.long

CONFIG = SHAPES["7B"]
FOUR_RULES = ("previous_row:refresh=block", "trim:level=changed", "near_rows", "light_commit")


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


@pytest.mark.parametrize(("name", "batch_size"), BUDGETS)
def test_a_forward_stays_within_its_budget(model: Transformer, name: str, batch_size: int) -> None:
    decoding = resolve_decoding(CONFIG, stop_ids=(), join="off")
    engine = Engine(model, decoder=DECODERS[name], batch_size=batch_size, decoding=decoding)
    prompts = [
        Prompt(tuple(range(3, 515 + 7 * place % 160)), max_new_tokens=40 + 4 * (place % 3))
        for place in range(2 * batch_size)
    ]
    trace = Counting()
    assert len(list(engine.generate(prompts, max_new_tokens=48, trace=trace))) == len(prompts)
    steps, prefills = (trace.counts[is_prefill] for is_prefill in (False, True))
    assert max(each.launches for each in steps) <= BUDGETS[name, batch_size][0]
    assert max(each.launches for each in prefills) <= BUDGETS[name, batch_size][1]
    assert {(each.uploads, each.downloads) for each in steps} == {(1, 1)}
    assert max(each.uploads for each in prefills) <= 2, "the second is where the buffer grows"
