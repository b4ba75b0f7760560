"""The Markdown pages of a repository: which ones there are, and what the artifacts make them say."""

from pathlib import Path

from stepsaver.engine.errors import UsageError
from stepsaver.report.markdown.markers import fill
from stepsaver.report.markdown.references import Figures, stored_experiment
from stepsaver.report.markdown.wrapping import overlong_lines, wrap
from stepsaver.report.results_page import BEGIN, result_tables, with_tables

PATTERNS = ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*/*.md", "experiments/*/*.md")
MEASUREMENTS = Path("benchmarks") / "measured"


def markdown_pages(root: Path) -> list[Path]:
    """Returns the pages that may contain figures."""
    return [path for pattern in PATTERNS for path in sorted(root.glob(pattern)) if path.is_file()]


def renewed(path: Path, root: Path) -> str:
    """Returns what a page should say, wrapped. If an experiment has no artifacts yet, its tables stay as they are."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    is_of_experiment = (path.parent / "experiment.yaml").exists()
    own = path.parent.name if is_of_experiment else None
    figures = Figures(root / MEASUREMENTS, own)
    try:
        if own is not None and path.name == "results.md" and BEGIN in text:
            tasks = stored_experiment(own).tasks
            text = with_tables(text, result_tables(tasks)) if tasks else text
        text = fill(text, figures.value, figures.table)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return wrap(text) if overlong_lines(text) else text
