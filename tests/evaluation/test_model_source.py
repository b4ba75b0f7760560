"""Names of models, and the mask token in a tokenizer's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import model_source
from stepsaver.evaluation.model_source import read_mask_id, resolve_model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_embedded_is_part_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "MODEL_FOLDER", tmp_path)
    with pytest.raises(UsageError, match="embedded model is missing"):
        resolve_model("embedded")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("embedded") == tmp_path


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "a/b/c", ""])
def test_a_wrong_name_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="expected 'embedded', a folder, or a hub id"):
        resolve_model(name)


def test_a_hub_id_without_a_network_is_one_line_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="model owner/absent-model ") as raised:
        resolve_model("owner/absent-model")
    assert "\n" not in str(raised.value)
    assert "hf_secret" not in str(raised.value)


def test_a_hub_id_takes_no_code_and_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **arguments: Any) -> str:
        asked.update(arguments, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name", revision="main") == tmp_path
    assert asked["name"] == "owner/name"
    assert asked["revision"] == "main"
    assert not [p for p in asked["allow_patterns"] if p.endswith((".py", ".bin", ".pt", ".pth", ".pkl"))]
    assert "*.safetensors" in asked["allow_patterns"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"|<MASK>|": 77}),
        ("tokenizer.json", {"added_tokens": [{"id": 77, "content": "|<MASK>|"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"77": {"content": "|<MASK>|"}}}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"77": {"content": "[HIDDEN]"}}, "mask_token": {"content": "[HIDDEN]"}},
        ),
    ],
)
def test_mask_id_is_found_wherever_it_is_kept(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    assert read_mask_id(tmp_path) == 77


def test_no_mask_token_and_broken_files(tmp_path: Path) -> None:
    assert read_mask_id(tmp_path) is None
    (tmp_path / "added_tokens.json").write_text("[]")
    with pytest.raises(UsageError, match="expected an object"):
        read_mask_id(tmp_path)


def test_the_real_mask_id(shared: Path) -> None:
    assert read_mask_id(shared / "fast_dllm_v2_7b") == 151665
