"""What a command will write is tried before it starts, and what it shows cannot steer a terminal."""

import json
from pathlib import Path

import pytest

from stepsaver.cli import main
from stepsaver.commands._outputs import check_output_file, check_output_folder
from stepsaver.commands.generate import for_terminal
from stepsaver.engine.errors import UsageError
from tests.conftest import GOLDEN
from tests.evaluation.tiny_folder import write_model_folder

PROMPT = ["--model", str(GOLDEN), "--ids", "--prompt", "5 6 7", "--max-new-tokens", "4"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", *PROMPT, "--trace", "/proc/trace.html"], "--trace /proc/trace.html: no file can be written"),
        (["generate", *PROMPT, "--trace", "{tmp}"], "no file can be written there (Is a directory)"),
        (["generate", *PROMPT, "--trace", "{tmp}/none/x.html"], "no file can be written there"),
        (["generate", *PROMPT, "--trace", "{tmp}/" + "x" * 300], "no file can be written there (File name too long)"),
        (["report", "00_baseline", "--csv", "/proc/x.csv"], "--csv /proc/x.csv: no file can be written there"),
        (["report", "00_baseline", "--figures", "/proc/figures"], "--figures /proc/figures: no file can be written"),
        (["report", "00_baseline", "--html", "/proc/x.html"], "--html /proc/x.html: no file can be written there"),
        (["report", "--html", "/proc/x.html"], "--html /proc/x.html: no file can be written there"),
    ],
)
def test_places_that_refuse_a_file_are_named_before_the_work(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for work in (
        "evaluation.open_model.load_model",
        "report.artifacts.read_stored_task",
        "report.overview.read_overview",
    ):
        monkeypatch.setattr(f"stepsaver.{work}", None)
    assert main([argument.replace("{tmp}", str(tmp_path)) for argument in command]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_trying_an_output_leaves_everything_as_it_is(tmp_path: Path) -> None:
    """It is not made, and what is there keeps its content."""
    known = tmp_path / "known.csv"
    known.write_text("content")
    check_output_file("--csv", tmp_path / "new.csv", (".csv",))
    check_output_file("--csv", known)
    check_output_file("--csv", None)
    check_output_folder("--figures", tmp_path / "figures" / "inner")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["figures", "inner", "known.csv"]
    assert known.read_text() == "content"
    with pytest.raises(UsageError, match=r"--csv new\.txt: the name ends in none of \.csv, \.CSV2"):
        check_output_file("--csv", Path("new.txt"), (".csv", ".CSV2"))


@pytest.mark.parametrize(("context", "status"), [(1020, 0), (1021, 2)])
def test_a_scored_request_leaves_room_for_a_stop_token(
    context: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1024 positions: the context, three tokens and the stop token."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"context_ids": [5] * context, "continuation_ids": [5, 6, 7]}) + "\n")
    folder = write_model_folder(tmp_path / "model")
    command = ["score", "--model", str(folder), "--ids", "--requests", str(requests), "--estimator", "reference"]
    assert main(command) == status
    assert ("exceed the model's 1024 positions" in capsys.readouterr().err) == (status == 2)


def test_a_text_cannot_steer_a_terminal() -> None:
    assert for_terminal("a\x1b[2Jb\x07\r\x9bc\u202e\td\né") == "a\\x1b[2Jb\\x07\\r\\x9bc\\u202e\td\né"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "nan"], "argument --temperature: 'nan' is not a number from 0 to 1e+100"),
        (["--temperature", "inf"], "--temperature: 'inf' is not"),
        (["--seed", str(1 << 63)], "is not a whole number from -9223372036854775808 to 9223372036854775807"),
        (["--device", "xpu"], "device 'xpu' is not supported"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--device", "cuda:99"], "not available"),
        (["--device", "cpu:7"], "not available"),
        (["--block-size", "10000000"], "--block-size: '10000000' is not a whole number from 1 to 4096"),
        (["--watch", "nan"], "--watch nan"),
        (["--rule", "x" * 1000], "unknown rule 'xxxx"),
    ],
)
def test_impossible_options_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *PROMPT, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 1100


@pytest.mark.parametrize("content", [b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[" * 100_000])
def test_prompts_that_are_no_text_are_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert main(["generate", "--model", "embedded", "--prompts", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert error.count("\n") == 1
