"""The index over all experiments: a page, the lines of the terminal, and `RESULTS.md` and `STATUS.md` as the source had
them.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import DISCARDED, experiment_names, find_experiment, results_folder, stored_limits
from stepsaver.engine.errors import UsageError
from stepsaver.report.artifacts import read_stored_task
from stepsaver.report.blocks import (
    TERMINAL,
    Block,
    Row,
    bare,
    cell,
    estimate,
    markdown,
    markdown_table,
    named,
    notes,
    number,
    plain_table,
    tab,
    table,
    text_rows,
)  # fmt: skip
from stepsaver.report.cells import ReportTask
from stepsaver.report.html_pages import report_page

PRIORITIES = ("critical", "high", "medium", "low")
LEVELS = ("invalid", "disturbed", "discarded", "remark")
LEAD = "What has been measured, what holds, what is known to be wrong, and what is still to be run."
WRITTEN = "<!-- written by `stepsaver report`; what is changed here is lost -->"
INDEX = ("experiment", "verdicts", "fastest", "drop", "last run", "question")
SHORT_INDEX = 4  # of these columns fit a terminal


class Pending(NamedTuple):
    """Something that is still to be done."""

    priority: str  # one of PRIORITIES
    text: str


@dataclass(frozen=True)
class Overview:
    """What is stored of every experiment; `pending` is what is still to be done, the most urgent first."""

    tasks: list[ReportTask]
    pending: list[Pending]
    discarded: list[str]

    def by_benchmark(self) -> dict[str, list[ReportTask]]:
        grouped: dict[str, list[ReportTask]] = {}
        for task in self.tasks:
            grouped.setdefault(task.summaries[0].task, []).append(task)
        return dict(sorted(grouped.items()))

    def by_experiment(self) -> dict[str, list[ReportTask]]:
        grouped: dict[str, list[ReportTask]] = {}
        for task in self.tasks:
            grouped.setdefault(task.experiment.name, []).append(task)
        return grouped


def read_overview(*, limit: int | None, tasks: Sequence[str] | None, model: str | None) -> Overview:
    names = experiment_names()
    if not names:
        raise UsageError("there is no experiment here; `stepsaver new NAME` makes one")
    found: list[ReportTask] = []
    pending: list[Pending] = []
    discarded: list[str] = []
    for name in names:
        experiment = find_experiment(name)
        discarded += _discarded(experiment)
        for task in tasks or experiment.spec.tasks:
            stored = _stored(experiment, task, limit, model or experiment.spec.model)
            pending += _pending(experiment, task, stored, limit)
            if stored is not None:
                found.append(stored)
    return Overview(found, sorted(pending, key=lambda each: PRIORITIES.index(each.priority)), discarded)


def _stored(experiment: Experiment, task: str, limit: int | None, model: str) -> ReportTask | None:
    """Returns the run with the limit that is asked for; without one, the full run, or else the largest there is."""
    results = results_folder(experiment, model)
    limits = [limit] if limit is not None else [None, *stored_limits(results, task)]
    for each in limits:
        stored = read_stored_task(experiment, results, task, limit=each, model=model, with_documents=False)
        if stored is not None:
            return stored
    return None


def _pending(experiment: Experiment, task: str, stored: ReportTask | None, limit: int | None) -> Iterator[Pending]:
    """Wrong results mislead, so they come first; then what is missing, what is undecided, and what is only a part."""
    command = f"stepsaver run {experiment.name} --task {task}" + (f" --limit {limit}" if limit else "")
    if stored is None:
        yield Pending("high", f"{experiment.name}, {task}: nothing is stored yet ({command})")
        return
    faults = sum(each.level == "invalid" for each in stored.findings)
    if faults:
        yield Pending("critical", f"{experiment.name}, {stored.folder}: the audit finds {faults} invalid; run it again")
    open_cells = [f"{each.name} ({each.note})" for each in stored.unfinished]
    if open_cells:
        yield Pending("high", f"{experiment.name}, {stored.folder}: {', '.join(open_cells)}")
    if stored.folder != task and limit is None:
        yield Pending("low", f"{experiment.name}, {task}: only {stored.folder} is there, not the full run ({command})")
    verdict = stored.verdict()
    if verdict.outcome == "undecided":
        yield Pending("medium", f"{experiment.name}, {stored.folder}: {verdict.sentence}")


def _discarded(experiment: Experiment) -> Iterator[str]:
    path = experiment.folder / DISCARDED
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            what = f"{experiment.name}, {entry['task']}: {entry['config']}"
            yield f"{what} was set aside on {str(entry['when'])[:8]}: {entry['why']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            yield f"{experiment.name}: a line of {DISCARDED} cannot be read"


def overview_page(overview: Overview) -> str:
    issues = known_issues(overview)
    blocks = [
        index_table(overview),
        _metrics(overview),
        _trade_offs(overview),
        notes(
            "Known issues",
            issues,
            nothing="The audits found nothing, and nothing was discarded.",
            name="issues",
            is_folded=not any(level == "invalid" for level, _ in issues),
        ),
        notes("Pending experiments", overview.pending, nothing="Nothing.", name="pending", is_folded=True),
    ]
    about = f"stepsaver report on all experiments · written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return report_page("Experiment results", LEAD, about, [tab("Index", blocks)], {})


def index_table(overview: Overview) -> Block:
    """Returns a line per experiment."""
    rows: list[Row] = []
    for name, tasks in overview.by_experiment().items():
        counts = Counter(task.verdict().outcome for task in tasks)
        verdicts = ", ".join(f"{outcome} {counts[outcome]}" for outcome in sorted(counts))
        compared = [one for task in tasks for _, group in task.by_baseline() for one in group if not one.is_control]
        timed = [one for one in compared if one.speed_up.smaller.value > 0]
        best = max(timed, key=lambda one: one.speed_up.smaller.value, default=None)
        where = f"{best.config}, {best.task}" if best else ""
        rows.append(
            [
                named(name),
                cell(verdicts, small=", ".join(f"{task.verdict().outcome} on {task.folder}" for task in tasks)),
                number(best.speed_up.smaller.value if best else None, ".2f", suffix="x", small=where),
                estimate(best.paired.drop_points, ".1f") if best else cell("-"),
                named(max(one.timestamp for task in tasks for one in task.summaries)[:10]),
                cell(tasks[0].experiment.spec.question),
            ]
        )
    return table("Experiments", INDEX, rows, name="index")


def index_text(overview: Overview, *, is_wide: bool = False) -> str:
    """Returns the line per experiment for a terminal: within 80 columns, or everything."""
    rows = index_table(overview)["rows"]
    if is_wide:
        return plain_table(text_rows(rows), INDEX)
    return plain_table(text_rows([bare(row[:SHORT_INDEX]) for row in rows]), INDEX[:SHORT_INDEX], width=TERMINAL)


def known_issues(overview: Overview) -> list[tuple[str, str]]:
    """Returns what the audits found and what was discarded, the worst first."""
    issues: list[tuple[str, str]] = [
        (finding.level, f"{task.experiment.name}, {task.folder}: {finding.message}")
        for task in overview.tasks
        for finding in task.findings
    ]
    issues += [("discarded", text) for text in overview.discarded]
    return sorted(issues, key=lambda each: LEVELS.index(each[0]))


def _metrics(overview: Overview) -> Block:
    """Returns the best of each benchmark over all experiments."""
    rows = []
    for name, tasks in overview.by_benchmark().items():
        found = [(one, f"{one.config} ({task.experiment.name})") for task in tasks for one in task.summaries]
        best, best_name = max(found, key=lambda each: each[0].accuracy)
        own = [each for each in found if not each[0].is_reference]
        fastest, fastest_name = max(own, key=lambda each: each[0].rate.value if each[0].rate else 0)
        rows.append(
            [
                named(name),
                number(best.accuracy, ".2f", factor=100, suffix=" %", small=best_name),
                number(fastest.rate.value if fastest.rate else None, ".2f", small=fastest_name),
                named(best_name),
                cell(", ".join(f"{task.experiment.name} {task.verdict().outcome}" for task in tasks)),
            ]
        )
    columns = ("Benchmark", "Best accuracy", "Best throughput (tokens/s)", "Configuration", "Notes")
    return table("Performance metrics summary", columns, rows, name="metrics", is_folded=True)


def _trade_offs(overview: Overview) -> Block:
    """Returns, per experiment and benchmark, each baseline, and the fastest of the configs compared with it."""
    rows = []
    for task in overview.tasks:
        for baseline, compared in task.by_baseline():
            others = [one for one in compared if not one.is_control]
            best = max(others, key=lambda one: one.speed_up.smaller.value, default=None)
            rows += [_trade_off(task, one, is_base=one is baseline) for one in (baseline, best) if one is not None]
    columns = ("Configuration", "Experiment", "Benchmark", "Accuracy", "Drop (points)", "Tokens/s", "Speed-up")
    return table("Accuracy against speed", columns, rows, name="trade_offs", is_folded=True)


def _trade_off(task: ReportTask, one: Summary, *, is_base: bool) -> Row:
    return [
        named(f"{one.config} ({'baseline' if is_base else 'fastest'})"),
        named(task.experiment.name),
        named(task.folder),
        number(one.accuracy, ".2f", factor=100, suffix=" %"),
        cell("-") if is_base else estimate(one.paired.drop_points, ".1f"),
        estimate(one.rate, ".2f") if one.rate else cell("-"),
        cell("1.00x", 1.0) if is_base else estimate(one.speed_up.smaller, ".2f", suffix="x"),
    ]


def results_document(overview: Overview) -> str:
    """Returns what was measured: the best of each benchmark, accuracy against speed, and what is still to be run."""
    parts = ["# Experiment Results", WRITTEN, "## Performance Metrics Summary", markdown(_metrics(overview))]
    parts += ["## Accuracy vs Speed Tradeoffs", markdown(_trade_offs(overview))]
    return "\n\n".join([*parts, "## Pending Experiments", _pending_lines(overview)]) + "\n"


def status_document(overview: Overview) -> str:
    """Returns where every experiment stands, what is known to be wrong, and what comes next."""
    rows = [
        (
            task.experiment.name,
            task.folder,
            task.model,
            f"{len(task.done)}/{len(task.cells)}",
            task.verdict().outcome,
            max(each.timestamp for each in task.summaries)[:10],
            task.source,
        )
        for task in overview.tasks
    ]
    columns = ("Experiment", "Task", "Model", "Configs done", "Verdict", "Date", "Read from")
    issues = [f"- **{level}**: {text}" for level, text in known_issues(overview)]
    parts = ["# Status", WRITTEN, markdown_table(rows, columns) if rows else "Nothing is stored yet."]
    parts += ["## Known Issues", "\n".join(issues) or "None.", "## Pending Experiments", _pending_lines(overview)]
    return "\n\n".join(parts) + "\n"


def _pending_lines(overview: Overview) -> str:
    lines = [
        f"{index}. {text}\n   - Priority: {priority}" for index, (priority, text) in enumerate(overview.pending, 1)
    ]
    return "\n".join(lines) or "Nothing."
