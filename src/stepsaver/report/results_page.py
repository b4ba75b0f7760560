"""`results.md` of an experiment: what is between the markers is generated, everything else is kept."""

import re
from collections.abc import Sequence
from pathlib import Path

from stepsaver.bench.documents import Summary
from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import Experiment
from stepsaver.engine.errors import UsageError
from stepsaver.report.blocks import bare, markdown, markdown_table, text_rows
from stepsaver.report.cells import ReportTask
from stepsaver.report.parallelism import aup_lines, parallelism_table
from stepsaver.report.published_numbers import PublishedNumbers, published_blocks
from stepsaver.report.tables import COLUMNS, compared_settings, complete_table, result_rows

BEGIN, END = "<!-- tables -->", "<!-- /tables -->"
LOG_LABELS = {"k": "Layer Reuse: k=", "layers": "Layer Subset: "}  # of a rule's fields, in the source's log


def result_tables(tasks: Sequence[ReportTask], published: PublishedNumbers | None = None) -> str:
    """Returns, per task, a heading, the verdict and the tables; then the entries of the experiment log."""
    parts = []
    for task in tasks:
        verdict, first = task.verdict(), task.summaries[0]
        rows = [[*bare(row[:2]), *row[2:]] for row in result_rows(task.summaries, verdict)]
        parts += [
            f"### {task.folder} ({first.samples} samples, {first.accuracy_metric})",
            verdict.sentence,
            _when_and_where(first),
            "#### Complete Results Table",
            markdown(complete_table(task)),
            "#### Against the baseline",
            markdown_table(text_rows(rows), COLUMNS),
        ]
        if aup_lines(task):  # only where thresholds were swept: elsewhere the tables above say it
            parts += ["#### Parallelism", markdown(parallelism_table(task))]
        for block in published_blocks(task, published) if published else ():
            parts += [f"#### {block['title']}", markdown(block)]
        missing = [f"{cell.name} ({cell.note or cell.state})" for cell in task.unfinished]
        if missing:
            parts.append(f"Not there yet: {', '.join(missing)}.")
    return "\n\n".join([*parts, "### Experiment Log", *map(log_entry, tasks)])


def _when_and_where(first: Summary) -> str:
    """Returns the machine, the date and how often everything was timed, in a sentence."""
    machine = first.machine.get("device") or first.identity.device
    sessions = "one session" if first.sessions == 1 else f"{first.sessions} sessions"
    return f"Measured on {first.timestamp[:10]} on {machine}, batch size {first.identity.batch_size}, in {sessions}."


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
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    new = f"{BEGIN}\n{result_tables(tasks, published)}\n{END}"
    whole = marked.sub(lambda _: new, text, count=1) if marked.search(text) else f"{text.rstrip()}\n\n{new}\n"
    write_beside(path, whole)
    return path


def log_entry(task: ReportTask) -> str:
    """Returns an entry of the experiment log, after the source's template."""
    first = task.summaries[0]
    notes = [task.verdict().sentence, *(f"{each.level}: {each.message}." for each in task.findings)]
    notes += [f"{cell.name}: {cell.note}." for cell in task.unfinished]
    return "\n".join(
        [
            f"#### {first.timestamp[:10]} - {task.experiment.name}",
            f"- **Task**: {task.folder} ({first.samples} samples)",
            "- **Configuration**:",
            *(f"  - {line}" for line in _configuration(task)),
            "- **Results**:",
            *(f"  - {line}" for line in _best(task)),
            f"- **Notes**: {' '.join(notes)}",
            f"- **Logs**: {task.source}/{task.folder}/",
        ]
    )


def _configuration(task: ReportTask) -> list[str]:
    first, settings = task.summaries[0], list(compared_settings(task).values())
    lines = [
        LOG_LABELS.get(name, f"{name}: ") + "/".join(dict.fromkeys(each[name] for each in settings))
        for name in (settings[0] if settings else ())
    ]
    rules_of = {cell.name: ", ".join(cell.config.rules) or "no reuse" for cell in task.cells}
    lines = lines or ["Rules: " + "; ".join(f"{name}: {rules}" for name, rules in rules_of.items())]
    decoding = first.identity.decoding
    caches = [name for name in ("prefix_cache", "block_cache") if getattr(decoding, name)]
    cached = " and ".join(each.replace("_", " ") for each in caches) or "no cache"
    batch = f"batch size {first.identity.batch_size}"
    return [*lines, f"Other params: {first.identity.decoder}, {cached}, {batch}, model {task.model}"]


def _best(task: ReportTask) -> list[str]:
    """Returns each baseline, and in each respect the best of the configs compared with it, without controls."""
    accuracy, rates, ups = [], [], []
    for base, compared in task.by_baseline():
        others = [one for one in compared if not one.is_control]
        if base is not None:
            accuracy.append(f"{base.config} {base.accuracy:.2%} (baseline)")
            rates.append(f"{base.config} {base.rate.value if base.rate else 0:.2f} tokens/s (baseline)")
        if others:
            best = max(others, key=lambda each: each.accuracy)
            fastest = max(others, key=lambda each: each.rate.value if each.rate else 0)
            up = max(others, key=lambda each: each.speed_up.smaller.value)
            accuracy.append(f"best of the others: {best.config} {best.accuracy:.2%}")
            rates.append(
                f"best of the others: {fastest.config} {fastest.rate.value if fastest.rate else 0:.2f} tokens/s"
            )
            ups.append(f"{up.config} {up.speed_up.smaller.value:.2f}x")
    return [
        f"Accuracy: {'; '.join(accuracy)}",
        f"Throughput: {'; '.join(rates)}",
        f"Speedup: {'; '.join(ups) or 'nothing beside the baseline'}",
    ]
