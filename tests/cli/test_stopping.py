"""Ctrl-C and a request to end: one line that says what is kept, the right exit code, and nothing lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepsaver.cli import main
from tests.bench.conftest import EXPERIMENT
from tests.evaluation.tiny_folder import write_model_folder


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    model = write_model_folder(tmp_path / "model")
    folder = tmp_path / "experiments" / "tiny"
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(EXPERIMENT.replace("{model}", str(model)))
    return folder


@pytest.mark.parametrize(
    ("sent", "code", "word"), [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_stopped_run_says_what_is_kept(experiment: Path, sent: signal.Signals, code: int, word: str) -> None:
    command = [sys.executable, "-m", "stepsaver", "run", "tiny", "--limit", "400"]
    with subprocess.Popen(
        command, cwd=experiment.parent.parent, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    ) as process:
        folder = experiment / "results" / "mini_ifeval_limit_400"
        _wait_for_chunk(folder, process)
        os.kill(process.pid, sent)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    said = [line for line in stderr.splitlines() if not line.startswith("note: ")]
    assert said == [f"stepsaver: {word}; every finished chunk is stored, and the same command goes on from there"]
    stored = [path.read_bytes().splitlines() for path in folder.glob("*/samples.jsonl")]
    assert any(stored), "the chunk that was finished"
    assert all(json.loads(lines[-1]) for lines in stored if lines)


def _heed_interrupts() -> None:
    """A suite that a shell runs in the background ignores Ctrl-C, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_chunk(folder: Path, process: "subprocess.Popen[str]") -> None:
    """Until two configs store something: then the chunk of one is whole, and that of the other perhaps not."""
    until = time.monotonic() + 240
    while sum(path.stat().st_size > 0 for path in folder.glob("*/samples.jsonl")) < 2:
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < until, "no chunk was stored"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["generate", "--model", "embedded", "--prompt", "x"], "nothing was written"),
        (["report"], "no file is half written"),
    ],
)
def test_every_command_says_what_a_stop_leaves(
    command: list[str], kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"stepsaver.commands.{command[0]}.run", interrupted)
    assert main(command) == 130
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert kept in error


def test_libraries_remarks_stay_out_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging
    import warnings

    def remark(options: object) -> int:
        warnings.warn("from a library", stacklevel=1)
        logging.getLogger("some.library").warning("from a library")
        logging.getLogger("stepsaver.evaluation").warning("our own")
        return 0

    for handler in logging.root.handlers[:]:  # pytest's own: with them nothing reaches the last resort
        logging.root.removeHandler(handler)
    monkeypatch.setattr("stepsaver.commands.list.run", remark)
    assert main(["list", "rules"]) == 0
    assert capsys.readouterr().err == "note: our own\n"
