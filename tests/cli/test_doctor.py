"""`doctor` on a checkpoint: what it says of a good one, and that a bad one is not called fine."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepsaver.cli import main
from stepsaver.evaluation.embedded import MODEL_FOLDER
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
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


def test_a_device_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "mps"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_logits_far_from_float32_are_not_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepsaver.commands import _checkup as checkup

    monkeypatch.setitem(checkup.TOLERATED, torch.bfloat16, 1e-6)
    code, found = findings(capsys, "--model", str(GOLDEN), "--dtype", "bfloat16")
    assert code == 1
    assert [name for name, each in found.items() if not each["is_fine"]] == ["float32 on the CPU"]
