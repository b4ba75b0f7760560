"""`results.md` of an experiment: what is between the markers is generated, everything else is kept."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import Experiment
from stepsaver.engine.errors import UsageError
from stepsaver.report.cells import ReportTask
from stepsaver.report.experiment_log import log_entry, log_entry_markdown
from stepsaver.report.parallelism import CAPTION, aup_lines, parallelism_texts
from stepsaver.report.parallelism import COLUMNS as PARALLELISM
from stepsaver.report.published_numbers import PublishedNumbers, published_markdown
from stepsaver.report.tables import COLUMNS, complete_columns, complete_rows, markdown_table, result_rows

BEGIN, END = "<!-- tables -->", "<!-- /tables -->"


def result_tables(tasks: Sequence[ReportTask], published: PublishedNumbers | None = None) -> str:
    """Returns, per task, a heading, the verdict and the tables; then the entries of the experiment log."""
    parts = []
    for task in tasks:
        verdict, first = task.verdict(), task.summaries[0]
        parts += [
            f"### {task.folder} ({first.samples} samples, {first.accuracy_metric})",
            verdict.sentence,
            "#### Complete Results Table",
            markdown_table(complete_rows(task), complete_columns(task)),
            "#### Against the baseline",
            markdown_table(result_rows(task.summaries, verdict)),
        ]
        if aup_lines(task):  # only where thresholds were swept: elsewhere the tables above say it
            parts += [
                "#### Parallelism",
                CAPTION,
                markdown_table(parallelism_texts(task), PARALLELISM),
                "\n".join(f"- {line}" for line in aup_lines(task)),
            ]
        if published is not None and (reported := published_markdown(task, published)):
            parts.append(reported)
        missing = [f"{cell.name} ({cell.note or cell.state})" for cell in task.unfinished]
        if missing:
            parts.append(f"Not there yet: {', '.join(missing)}.")
    parts.append("### Experiment Log")
    parts += [log_entry_markdown(log_entry(task)) for task in tasks]
    return "\n\n".join(parts)


def update_results(
    experiment: Experiment,
    tasks: Sequence[ReportTask],
    path: Path | None = None,
    *,
    published: PublishedNumbers | None = None,
) -> Path:
    """Writes the tables between the markers, which are added to a page without them. Returns the page's path."""
    path = path or experiment.folder / "results.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"# Results: {experiment.name}\n"
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    write_beside(path, with_tables(text, result_tables(tasks, published)))
    return path


def with_tables(text: str, tables: str) -> str:
    """Returns a page with the tables between its markers, or after its text."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    new = f"{BEGIN}\n{tables}\n{END}"
    return marked.sub(lambda _: new, text, count=1) if marked.search(text) else f"{text.rstrip()}\n\n{new}\n"


def as_csv(experiment: Experiment, tasks: Sequence[ReportTask]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(("experiment", "task", *COLUMNS))
    for task in tasks:
        writer.writerows((experiment.name, task.folder, *row) for row in result_rows(task.summaries, task.verdict()))
    return stream.getvalue()
