"""Token for token and forward for forward what the reference decoder produced."""

import pytest
import torch
from safetensors.torch import load_file

from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.positions import positions_between
from tests.conftest import GOLDEN, SHARED
from tests.engine.golden_cases import assert_equal_to_reference, decode_case, read_golden

OWN_CASES = read_golden(GOLDEN)["cases"]
FULL_SETS = [(name, case) for name in ("tied-12", "untied-28") for case in range(28)]


@pytest.mark.parametrize("number", range(len(OWN_CASES)))
def test_case_equals_reference(golden_model: Transformer, number: int) -> None:
    assert_equal_to_reference(OWN_CASES[number], decode_case(golden_model, OWN_CASES[number]))


@pytest.fixture(scope="module")
def full_sets() -> dict:
    if not SHARED.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    names = ("tied-12", "untied-28")
    return {
        name: (load_model(SHARED / "golden" / name, dtype=torch.float32), read_golden(SHARED / "golden" / name))
        for name in names
    }


@pytest.mark.parametrize(("name", "number"), FULL_SETS)
def test_every_shared_case_equals_reference(full_sets: dict, name: str, number: int) -> None:
    model, golden = full_sets[name]
    case = golden["cases"][number]
    assert_equal_to_reference(case, decode_case(model, case))


@pytest.mark.parametrize("folder", [GOLDEN, SHARED / "golden" / "tied-12", SHARED / "golden" / "untied-28"])
def test_plain_logits(folder) -> None:
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    model = load_model(folder, dtype=torch.float32)
    stored = load_file(folder / "forward.safetensors")
    ids = stored["input_ids"][0].numpy()
    rows = len(ids)
    cache = KeyValueCache(model.config, slots=1, capacity=rows, dtype=model.dtype, device=model.device)
    everything = positions_between(0, rows)
    plan = whole_plan("prefill", window=everything, reads=everything, layers=model.config.layers)
    logits = run_step(model, Memory(cache, None, model.rotations(rows)), [Step(0, 0, ids, 32, plan)]).logits
    assert torch.allclose(logits, stored["logits"][0], atol=1e-4, rtol=0)
