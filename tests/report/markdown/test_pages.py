"""The repository's own pages say what its artifacts say."""

from pathlib import Path

import pytest

from stepsaver.cli import main

ROOT = Path(__file__).parents[3]


def test_figures_and_the_reference_of_commands_are_those_of_artifacts_and_parsers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(["docs", "--check"])
    assert code == 0, f"{capsys.readouterr().out}run `stepsaver docs`"
