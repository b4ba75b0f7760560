"""The repository's own pages say what its artifacts say, and are wrapped."""

from pathlib import Path

import pytest

from stepsaver.cli import main
from stepsaver.report.markdown.pages import markdown_pages
from stepsaver.report.markdown.wrapping import WIDTH, overlong_lines

ROOT = Path(__file__).parents[3]


def test_figures_and_the_reference_of_commands_are_those_of_artifacts_and_parsers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = main(["docs", "--check"])
    assert code == 0, f"{capsys.readouterr().out}run `stepsaver docs`"


@pytest.mark.parametrize("page", markdown_pages(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_wrapped(page: Path) -> None:
    found = overlong_lines(page.read_text(encoding="utf-8"))
    assert not found, f"lines {found} are wider than {WIDTH}"
