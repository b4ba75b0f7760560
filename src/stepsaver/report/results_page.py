"""`results.md` of an experiment: tables between markers are generated, everything else is kept."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from stepsaver.bench.spec import Experiment
from stepsaver.bench.store import write_beside
from stepsaver.bench.verdict import judge
from stepsaver.report.tables import COLUMNS, markdown_table, result_rows

BEGIN, END = "<!-- tables -->", "<!-- /tables -->"


def result_tables(experiment: Experiment, by_task: dict[str, list[dict[str, Any]]]) -> str:
    """A heading, the verdict and a table per task."""
    parts = []
    for task, summaries in by_task.items():
        verdict = judge(summaries, experiment.spec.success)
        first = summaries[0]
        missing = [config.name for config in experiment.configs if config.name not in {s["config"] for s in summaries}]
        parts += [
            f"### {task} ({first['samples']} samples, {first['accuracy_metric']})",
            verdict.sentence,
            markdown_table(result_rows(summaries, verdict)),
        ]
        if missing:
            parts.append(f"Not there yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def update_results(experiment: Experiment, by_task: dict[str, list[dict[str, Any]]]) -> Path:
    """Writes the tables between the markers, which are added where a page has none."""
    path = experiment.folder / "results.md"
    text = path.read_text(encoding="utf-8") if path.exists() else f"# Results: {experiment.name}\n"
    tables = f"{BEGIN}\n{result_tables(experiment, by_task)}\n{END}"
    if BEGIN in text and END in text:
        text = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: tables, text, count=1, flags=re.DOTALL)
    else:
        text = f"{text.rstrip()}\n\n{tables}\n"
    write_beside(path, text)
    return path


def as_csv(experiment: Experiment, by_task: dict[str, list[dict[str, Any]]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(("experiment", "task", *COLUMNS))
    for task, summaries in by_task.items():
        verdict = judge(summaries, experiment.spec.success)
        writer.writerows((experiment.name, task, *row) for row in result_rows(summaries, verdict))
    return stream.getvalue()
