"""Nemotron-Labs-Diffusion: token for token and forward for forward what its public decoder produces, for a part of its
cases that is here and all of those in the shared folder; and beside literal evaluations on random models.
"""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.autoregressive import Autoregressive
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.policies.quota import Quota
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rows import rows_between
from tests.conftest import SHARED
from tests.engine.golden_cases import read_golden

FOLDERS = [SHARED / "golden_nld" / "trained-b8", SHARED / "golden_nld" / "untrained-b16"]
KINDS = {"causal": ("prefill", "commit", "verify"), "block": ("full", "draft")}


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Path, Transformer]:
    if not request.param.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    return request.param, load_model(request.param, dtype=dtype)


def decoder_of(case: dict) -> Decoder:
    if case["mode"] == "autoregressive":
        return Autoregressive()
    if case["threshold"] is None:
        return Denoise(Quota(case["denoising_steps"]))
    return Denoise(Threshold(case["threshold"], strict=False))


def text_of(case: dict) -> list[int]:
    ids = case["output"][len(case["prompt"]) :][: case["max_new_tokens"]]
    return ids[: ids.index(case["stop_token"]) + 1] if case["stop_token"] in ids else ids


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("mode", ["autoregressive", "block"])
def test_every_case_equals_the_public_decoder(golden: tuple[Path, Transformer], mode: str, batch_size: int) -> None:
    folder, model = golden
    cases = [case for case in read_golden(folder)["cases"] if case["mode"] == mode]
    settings = ("block_size", "threshold", "denoising_steps", "stop_token")
    for _, group in groupby(cases, key=lambda case: [case[name] for name in settings]):
        same = list(group)
        decoding = resolve_decoding(model.config, block_size=same[0]["block_size"], stop_ids=(same[0]["stop_token"],))
        engine = Engine(model, decoder=decoder_of(same[0]), decoding=decoding, batch_size=batch_size, checked=True)
        prompts = [Prompt(tuple(case["prompt"]), max_new_tokens=case["max_new_tokens"]) for case in same]
        found = list(engine.generate(prompts, max_new_tokens=0))
        assert len(found) == len(same)
        for completion in found:
            case = same[completion.index]
            assert completion.ids == text_of(case), case["prompt"]
            rest = [kind for kind, *_ in case["trace"][len(completion.steps) :]]  # of the block in which the text ended
            assert rest == [] if mode == "autoregressive" else rest == ["block"] * (len(rest) - 1) + ["causal"]
            for step, (kind, count, *_) in zip(completion.steps, case["trace"], strict=False):
                assert step.kind in KINDS[kind], case["prompt"]
                assert step.rows == count, case["prompt"]


def test_plain_logits(golden: tuple[Path, Transformer]) -> None:
    folder, model = golden
    stored = load_file(folder / "forward.safetensors")
    ids, start = stored["ids"].flatten().numpy(), int(stored["start"])
    cache = KeyValueCache(model.config, slots=1, capacity=len(ids), dtype=model.dtype, device=model.device)
    memory = Memory(cache, None, model.rotations(len(ids)))

    def logits(first: int, block_size: int) -> torch.Tensor:
        window = rows_between(0, len(ids) - first)
        plan = whole_plan("prefill", window=window, reads=window, layers=model.config.layers)
        return run_step(model, memory, [Step(0, first, np.array(ids[first:]), block_size, plan)]).logits

    causal, block = logits(0, 1), logits(start, len(ids) - start)
    assert torch.allclose(causal.double(), stored["causal_logits"].view_as(causal).double(), atol=1e-4, rtol=0)
    assert torch.allclose(
        block.double(), stored["block_logits"][..., start:, :].view_as(block).double(), atol=1e-4, rtol=0
    )
