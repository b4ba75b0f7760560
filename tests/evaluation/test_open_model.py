"""Opening a model: what is wrong is said before a weight is read, and what nobody says is asked for."""

import json
from pathlib import Path

import pytest
import torch

import stepsaver
from stepsaver.cli import main
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models import architecture
from stepsaver.engine.models.architecture import Architecture, architectures
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.policies.quota import Quota
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.evaluation.lm_eval_cli import RegisteredLM
from stepsaver.evaluation.open_model import open_model
from tests.evaluation.byte_tokenizer import MASK_ID
from tests.evaluation.tiny_folder import CONFIG, write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def without_weights(tmp_path: Path, folder: Path) -> Path:
    """A folder whose weights cannot be read: whoever opens it and does not fail has not tried."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def write_config(folder: Path, **changes: object) -> str:
    content = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def open_sized(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an architecture that leaves block size and mask token to its checkpoints."""
    name = "OpenSizedForCausalLM"
    known = architectures() | {
        name: Architecture(name, attention_bias=True, output_bias=False, mask_id=None, block_size=None)
    }
    monkeypatch.setattr(architecture, "_own", lambda: known)
    return name


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("Fast_dLLM_QwenForCausalLM", Threshold(0.9)), ("SDARForCausalLM", Quota(threshold=0.85))],
)
def test_a_model_decodes_by_the_policy_of_its_own_decoder_unless_told_otherwise(
    without_weights: Path, architecture: str, expected: Policy
) -> None:
    opened = open_model(write_config(without_weights, architectures=[architecture], mask_token_id=MASK_ID))
    assert opened.decoder().policy == expected
    assert opened.decoder(threshold=0.7).policy == Threshold(0.7)
    assert opened.decoder("autoregressive").policy is None


def test_what_differs_from_its_own_decoder_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    stepsaver.load(folder, prefix_cache=False)
    assert not caplog.messages
    stepsaver.load(folder, block_size=4, block_cache=False)
    said = (
        "not as Fast_dLLM_QwenForCausalLM's own decoder: block_size 4 (its own: 8), sub_block_size 4 (its own: 8), "
        "block_cache False (its own: True)"
    )
    assert caplog.messages == [said]
    options = ["--block-size", "4", "--no-block-cache", "--max-new-tokens", "1"]
    assert main(["generate", "--model", str(folder), "--prompt", "a", *options]) == 0
    assert f"note: {said}\n" in capsys.readouterr().err


def test_opening_reads_no_weights_and_loading_does(without_weights: Path, folder: Path) -> None:
    opened = open_model(str(without_weights))
    assert (opened.decoding.block_size, opened.decoding.sub_block_size, opened.decoding.mask_id) == (8, 8, MASK_ID)
    assert opened.tokenizer is opened.tokenizer
    assert opened.tokenizer.decode(opened.tokenizer.encode("abc")) == "abc"
    outline = opened.outline()
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    with pytest.raises(UsageError, match="safetensors"):
        opened.load()
    loaded = open_model(str(folder), dtype="float64").load()
    assert loaded.dtype == torch.float64
    assert [p.shape for p in loaded.parameters()] == [p.shape for p in outline.parameters()]


def test_rules_are_checked_before_weights_are_read(without_weights: Path) -> None:
    opened = open_model(str(without_weights), block_cache=False)
    with pytest.raises(UsageError, match="needs the block cache"):
        opened.engine(Denoise(rules=(parse_rule("trim"),)), batch_size=1)


def test_an_engine_has_what_the_model_was_opened_with(folder: Path) -> None:
    opened = open_model(str(folder), block_size=4, stop_ids=(7,), prefix_cache=False)
    engine = opened.engine(Denoise(Threshold(0.5)), batch_size=3)
    assert engine.decoding == opened.decoding
    assert (engine.decoding.block_size, engine.decoding.stop_ids, engine.decoding.prefix_cache) == (4, (7,), False)
    assert (engine.decoder.policy, engine.batch_size) == (Threshold(0.5), 3)


@pytest.mark.parametrize(
    ("block", "sub_block"), [(1, 1), (2, 2), (4, 4), (6, 6), (7, 7), (8, 8), (9, 3), (12, 6), (32, 8), (36, 6), (64, 8)]
)
def test_the_default_sub_block_divides_every_block(without_weights: Path, block: int, sub_block: int) -> None:
    name = write_config(without_weights, bd_size=block)
    assert open_model(name).decoding.sub_block_size == sub_block
    with pytest.raises(UsageError, match=rf"sub-block size 5 does not divide the block size {block}"):
        open_model(name, sub_block_size=5)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"bd_size": 4}, 4),
        ({"bd_size": None, "block_size": 4}, 4),
        ({"bd_size": 4, "block_size": 4}, 4),
        ({"bd_size": None}, 32),  # the architecture's
    ],
)
def test_either_name_of_the_block_size_is_read(without_weights: Path, sizes: dict, expected: int) -> None:
    assert open_model(write_config(without_weights, **sizes)).config.block_size == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"bd_size": 8, "block_size": 4}, "bd_size 8 and block_size 4 differ"),
        ({"bd_size": None, "block_size": "4"}, "block_size '4' is not a whole number"),
        ({"bd_size": 0}, "bd_size 0 is not a whole number from 1 to"),
    ],
)
def test_impossible_block_sizes_are_one_line(without_weights: Path, sizes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        open_model(write_config(without_weights, **sizes))
    assert "\n" not in str(error.value)


def test_what_nobody_says_is_asked_for_and_never_guessed(without_weights: Path, open_sized: str) -> None:
    for path in without_weights.iterdir():  # the tokenizer's files name the mask token
        path.unlink()
    name = write_config(without_weights, architectures=[open_sized], bd_size=None)
    with pytest.raises(UsageError, match=rf"{open_sized} says how many positions a block has; set --block-size"):
        open_model(name)
    with pytest.raises(UsageError, match="need a mask token and this model names none; set --mask-id"):
        open_model(name, block_size=4)
    assert open_model(name, block_size=1).decoding.sub_block_size == 1
    decoding = open_model(name, block_size=4, mask_id=9).decoding
    assert (decoding.block_size, decoding.sub_block_size, decoding.mask_id) == (4, 4, 9)


def test_every_entry_asks_for_the_block_size_and_takes_it(
    without_weights: Path, open_sized: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are not there, so whoever gets past the configuration complains about those."""
    name = write_config(without_weights, architectures=[open_sized], bd_size=None)
    generate = ["generate", "--model", name, "--prompt", "a"]
    run = ["run", "00_baseline", "--task", "mini_mmlu", "--limit", "1", "--dry-run", "--model", name]
    for command in (generate, run):
        assert main(command) == 2
        assert "set --block-size" in capsys.readouterr().err
    assert main([*generate, "--block-size", "4"]) == 2
    assert "safetensors" in capsys.readouterr().err
    assert main([*run, "--block-size", "4"]) == 0
    with pytest.raises(UsageError, match="set --block-size"):
        RegisteredLM.create_from_arg_obj({"pretrained": name})
    with pytest.raises(UsageError, match="safetensors"):
        RegisteredLM.create_from_arg_obj({"pretrained": name, "block_size": 4})
