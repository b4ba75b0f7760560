"""Small functions that torch compiles for a GPU, on the CPU: uncompiled and compiled they are torch's operations."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepsaver.engine.backends import TORCH, Backend
from stepsaver.engine.backends.gpu import choice, fused
from stepsaver.engine.backends.gpu.fused import Fused, compiled
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.rope import Rope
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.positions import positions_between
from stepsaver.engine.rules.rule import parse_rule
from tests.conftest import GOLDEN, sharpened, tiny_config
from tests.engine.golden_cases import assert_equal_to_reference, decode_case, read_golden

PROMPTS = [tuple(range(5, 5 + length)) for length in (3, 8, 13, 16, 21)]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen": {},
    "sdar": {"architecture": "SDARForCausalLM", "head_norms": True, "qkv_bias": False},
    "nemotron": {
        "architecture": "NemotronLabsDiffusionModel",
        "qkv_bias": False,
        "rope": Rope(theta=1e4, query_growth=0.3, original_positions=16),
    },
}
DECODERS = {
    "plain": Denoise(),
    "rules": Denoise(rules=tuple(map(parse_rule, ("window:refresh=block", "trim:level=changed", "suffix_dropout")))),
    "layer_reuse": Denoise(rules=(parse_rule("layer_reuse:k=2,layers=middle"),)),
    "drafts": parse_decoder("speculative:positions=12,span=4"),
}


class OnCpu(Fused):
    """Attention as the CPU has it; a GPU's is not there."""

    mix = Backend.mix


def pair(family: str, compiler: Any) -> tuple[Transformer, Transformer]:
    plain = sharpened(random_model(tiny_config(layers=4, **FAMILIES[family]), dtype=torch.float64, seed=5))
    other = deepcopy(plain)
    other.fused = OnCpu(compiler)
    return plain, other.prepare()


def mixed_steps(random: np.random.Generator, most: int) -> list[Step]:
    """Full blocks, sub-blocks with a hole, causal positions, and a second turn of a slot."""
    steps = []
    for slot in random.permutation(3)[: random.integers(1, most + 1)]:
        kind, start = random.integers(0, 3), 8 * int(random.integers(0, 3))
        first, last, size, count = 0, 8, 8, 8
        if kind == 1:
            first, last = 4, 8
        elif kind == 2:
            last, size, start = int(random.integers(1, 7)), 1, start + 3
            count = last
        window = positions_between(first, last)
        if kind == 1 and random.integers(2):
            window &= ~(1 << 5)
        reads = window if kind else positions_between(0, 3)
        plan = whole_plan("sub", window=window, reads=reads, layers=4)
        steps.append(Step(int(slot), start, random.integers(4, 61, count), size, plan))
    return steps


def compare_forwards(family: str, compiler: Any, forwards: int) -> OnCpu:
    plain, other = pair(family, compiler)
    random, table = np.random.default_rng(0), plain.rotations(64)
    filled = torch.randn(4, 3, 4, 64, 8, dtype=torch.float64)
    kept: dict[str, Any] = {"slots": 3, "capacity": 64, "dtype": torch.float64, "device": torch.device("cpu")}
    caches = [KeyValueCache(plain.config, **kept, backend=backend) for backend in (TORCH, other.backend)]
    for forward in range(forwards):
        steps = mixed_steps(random, 1 + forward % 3)
        for cache in caches:
            cache.stored[..., :64, :] = filled
        expected, found = (
            run_step(model, Memory(cache, None, table), steps).logits
            for model, cache in zip((plain, other), caches, strict=True)
        )
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)
        assert torch.allclose(caches[1].stored[..., :64, :], caches[0].stored, rtol=0, atol=1e-11)
        chosen, tokens = (backend.argmax(expected.clone(), 1) for backend in (other.backend, TORCH))
        assert torch.equal(chosen[0], tokens[0])
        assert torch.allclose(chosen, tokens, rtol=1e-9, atol=1e-9)
    assert isinstance(other.fused, OnCpu)
    return other.fused


def compare_decodes(family: str, decoder: Decoder, compiler: Any) -> None:
    decoded = []
    for model in pair(family, compiler):
        decoding = resolve_decoding(model.config, sub_block_size=4, stop_ids=())
        engine = Engine(model, decoder=decoder, batch_size=3, decoding=decoding, checked=True)
        found = engine.generate(PROMPTS, max_new_tokens=20)
        decoded.append({each.index: (each.ids, each.confidences) for each in found})
    for index, (ids, confidences) in decoded[0].items():
        assert decoded[1][index][0] == ids
        assert decoded[1][index][1] == pytest.approx(confidences, abs=1e-9)


def uncompiled(function: Any) -> Any:
    return function


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_uncompiled_are_the_forward(family: str) -> None:
    compare_forwards(family, uncompiled, 40)


@pytest.mark.parametrize("decoder", DECODERS)
def test_functions_uncompiled_decode_the_same_tokens(decoder: str) -> None:
    compare_decodes("qwen", DECODERS[decoder], uncompiled)


@pytest.mark.parametrize("compiler", [uncompiled, pytest.param(compiled, marks=pytest.mark.long)])
def test_golden_texts_are_the_references(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SHAPES", 4)
    torch._dynamo.reset()
    model = load_model(GOLDEN, dtype=torch.float64)
    model.fused = OnCpu(compiler)
    model.prepare()
    for case in read_golden(GOLDEN)["cases"]:
        assert_equal_to_reference(case, decode_case(model, case))


def test_a_function_is_compiled_for_so_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SHAPES", 2)
    called: list[int] = []
    limited = fused.Limited(lambda x: x + 1, lambda function: lambda x: called.append(len(x)) or function(x))
    for limited.forward in range(fused.OFTEN + 1):
        for count in (3, 3, 4, 5, 3, 5, 4):  # layers of a forward
            assert limited(torch.zeros(count)).tolist() == [1.0] * count
    assert called == [3, 3, 4, 3, 4] * 2, "from the third forward on, and two shapes"
    assert limited.met.keys() == {((torch.Size([5]), (1,)),)}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_functions_are_the_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 random forwards; no graph breaks, and no more graphs than shapes were met."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(fused, "SHAPES", 3)
    monkeypatch.setattr(fused, "OFTEN", 1)
    torch._dynamo.reset()
    counters.clear()
    used = compare_forwards(family, compiled, 200)
    assert 0 < counters["stats"]["unique_graphs"] <= sum(len(each.shapes) for each in used.functions)
    assert not counters["graph_break"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "decoder"), [("qwen", "plain"), ("sdar", "rules"), ("nemotron", "drafts"), ("qwen", "layer_reuse")]
)
def test_compiled_functions_decode_the_same_tokens(family: str, decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SHAPES", 2)
    monkeypatch.setattr(fused, "OFTEN", 1)
    torch._dynamo.reset()
    compare_decodes(family, DECODERS[decoder], compiled)


def test_compiled_functions_serve_where_they_were_found_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A finding is of a card, a driver, versions, a precision and a shape of model."""
    card, config = torch.device("cuda"), tiny_config()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setattr(choice, "_version", lambda name: "3.9.0")
    assert choice.fused_backend("auto", config, torch.float16, card) is None
    choice.note_finding(config, torch.float16, card, equal=True)
    assert isinstance(choice.fused_backend("auto", config, torch.float16, card), Fused)
    assert choice.fused_backend("off", config, torch.float16, card) is None
    assert choice.fused_backend("auto", config, torch.bfloat16, card) is None
    assert choice.fused_backend("auto", tiny_config(layers=2), torch.float16, card) is None
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010)
    assert choice.fused_backend("auto", config, torch.float16, card) is None
    assert isinstance(choice.fused_backend("on", config, torch.float16, card), Fused)
    choice.note_finding(config, torch.float16, card, equal=False)
    assert choice.fused_backend("auto", config, torch.float16, card) is None
    choice.finding_file(config, torch.float16, card).write_text("[]")
    assert choice.fused_backend("auto", config, torch.float16, card) is None


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for choose, device, says in (
        ("on", "cpu", "compile=on is for GPUs"),
        ("on", "cuda", "compile=on needs triton"),
        ("maybe", "cpu", "unknown compile 'maybe'"),
    ):
        monkeypatch.setattr(choice, "_version", lambda name: None)
        with pytest.raises(UsageError, match=f"^{says}"):
            choice.check_compile(choose, torch.device(device))  # type: ignore[arg-type]
    assert load_model(GOLDEN, dtype=torch.float32, compile="auto").fused is None
