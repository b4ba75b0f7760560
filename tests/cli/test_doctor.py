"""`doctor` on a checkpoint: what it says of a good one, and that a bad one is not called fine."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepsaver.cli import main
from stepsaver.evaluation.embedded import MODEL_FOLDER
from stepsaver.evaluation.open_model import open_model
from tests.conftest import GOLDEN


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", "--json", *arguments])
    return code, {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_the_embedded_model_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, "--model", "embedded")
    assert code == 0
    assert found["decoding"]["says"].startswith("8 prompts")
    assert found["control layer_reuse:k=1"]["says"].startswith("8 of 8")
    assert "choose the same token" in found["float32 on the CPU"]["says"]
    for kind in ("prefill", "full step", "sub step", "commit"):
        assert " ms at batch 1, " in found[kind]["says"]


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "float64"])
def test_other_precisions_are_compared_with_float32(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """A folder without a tokenizer is decoded from ids."""
    code, found = findings(capsys, "--model", str(GOLDEN), "--dtype", dtype)
    assert code == 0, found
    assert dtype in found["weights"]["says"]


def test_a_weight_that_is_no_number_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(MODEL_FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    code, found = findings(capsys, "--model", str(folder))
    assert code == 1
    assert not found["decoding"]["is_fine"]
    assert "not finite" in found["decoding"]["says"]


def test_the_page_about_a_card_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU can stand in for one, which has no file of findings to write and compiles nothing here."""
    from stepsaver.commands import _card as card
    from stepsaver.commands import _checkup as checkup
    from stepsaver.engine.backends import Backend
    from stepsaver.engine.backends.gpu.fused import Fused

    class OnCpu(Fused):
        mix = Backend.mix

    noted: list[bool] = []
    monkeypatch.setattr(card, "Fused", lambda: OnCpu(lambda function: function))
    monkeypatch.setattr(card, "check_compile", lambda compile, device: None)
    monkeypatch.setattr(card, "note_finding", lambda *_, equal: noted.append(equal))
    monkeypatch.setattr(card, "LAUNCHES", 10)
    opened = open_model(str(GOLDEN), dtype="float64")
    model = opened.load()
    logits = partial(checkup._logits, opened=opened, prompts=[(5, 6, 7, 8), tuple(range(5, 30))])
    found = {each.name: each for each in card.card_checks(opened, model, logits)}
    assert list(found) == [
        "card", "attention", "maps", "launches", "residual stream", "drafts", "compiled functions",
    ]  # fmt: skip
    assert all(each.is_fine for each in found.values()), found
    assert noted == [True]
    assert model.fused is None
    assert "with speculative:positions=24" in found["drafts"].says

    class Wrong(OnCpu):
        def silu_product(self, gate_up: torch.Tensor) -> torch.Tensor:
            return 1.01 * super().silu_product(gate_up)

    monkeypatch.setattr(card, "Fused", lambda: Wrong(lambda function: function))
    wrong = [each for each in card.card_checks(opened, model, logits) if not each.is_fine]
    assert [each.name for each in wrong] == ["compiled functions"]
    assert noted == [True, False]
    assert wrong[0].says.endswith("--compile auto is off")

    monkeypatch.setattr(card, "_maps", lambda model: 1 / 0)
    failed = {each.name: each for each in card.card_checks(opened, model, logits)}
    assert failed["maps"] == ("maps", False, "ZeroDivisionError: division by zero")
    assert len(failed) == len(found), "the page goes on"


@pytest.mark.parametrize("device", ["mps", "cuda"])
def test_a_device_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str], device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    assert main(["doctor", "--model", "embedded", "--device", device]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_logits_far_from_float32_are_not_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepsaver.commands import _checkup as checkup

    monkeypatch.setitem(checkup.TOLERATED, torch.bfloat16, 1e-6)
    code, found = findings(capsys, "--model", str(GOLDEN), "--dtype", "bfloat16")
    assert code == 1
    assert [name for name, each in found.items() if not each["is_fine"]] == ["float32 on the CPU"]
