"""The page over all experiments, after the source's results document."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import DISCARDED, experiment_names, find_experiment, results_folder, stored_limits
from stepsaver.engine.errors import UsageError
from stepsaver.report.artifacts import read_stored_task
from stepsaver.report.blocks import Block, TableEntry, cell, figure, interval, notes, number, tab, table
from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.experiment_log import log_entry
from stepsaver.report.figures import PALETTE, SYMBOLS, in_turn, layout, plain
from stepsaver.report.report_page import report_page
from stepsaver.report.task_blocks import rate_entry

PRIORITIES = ("critical", "high", "medium", "low")
LEAD = "What has been measured, what holds, what is known to be wrong, and what is still to be run."


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
    tabs = [tab("Summary", _summary(overview)), tab("Experiment log", [_log(overview)])]
    tabs += [tab(name, _benchmark(tasks)) for name, tasks in overview.by_benchmark().items()]
    about = f"stepsaver report on all experiments · written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return report_page("Experiment results", LEAD, about, tabs, {})


def known_issues(overview: Overview) -> list[tuple[str, str]]:
    """Returns what the audits found and what was discarded, the worst first."""
    issues: list[tuple[str, str]] = [
        (finding.level, f"{task.experiment.name}, {task.folder}: {finding.message}")
        for task in overview.tasks
        for finding in task.findings
    ]
    issues += [("discarded", text) for text in overview.discarded]
    return sorted(issues, key=lambda each: ("invalid", "disturbed", "discarded", "remark").index(each[0]))


def _summary(overview: Overview) -> list[Block]:
    issues = known_issues(overview)
    return [
        metrics_table(overview),
        trade_off_table(overview),
        notes("Known issues", issues, nothing="The audits found nothing, and nothing was discarded.", name="issues"),
        notes("Pending experiments", overview.pending, nothing="Nothing.", name="pending"),
    ]


def metrics_table(overview: Overview) -> Block:
    """Returns the best of each benchmark over all experiments."""
    rows = []
    for name, tasks in overview.by_benchmark().items():
        cells = [(task, each) for task in tasks for each in task.done]
        best = max(cells, key=lambda each: _summary_of(each[1]).accuracy)
        fastest = max(cells, key=lambda each: _rate(each[1]))
        verdicts = ", ".join(f"{task.experiment.name} {task.verdict().outcome}" for task in tasks)
        rows.append(
            [
                cell(name, name),
                number(_summary_of(best[1]).accuracy, ".2f", factor=100, suffix=" %", small=_label(*best)),
                number(_rate(fastest[1]) or None, ".2f", small=_label(*fastest)),
                cell(_label(*best), _label(*best)),
                cell(verdicts),
            ]
        )
    columns = ("Benchmark", "Best accuracy", "Best throughput (tokens/s)", "Configuration", "Notes")
    return table("Performance metrics summary", columns, rows, name="metrics")


def trade_off_table(overview: Overview) -> Block:
    """Returns, per experiment and benchmark, each baseline, and the fastest of the configs compared with it."""
    rows = []
    for task in overview.tasks:
        for baseline, compared in task.by_baseline():
            others = [each for each in compared if not _summary_of(each).is_control]
            best = max(others, key=lambda each: _summary_of(each).speed_up.smaller.value, default=None)
            rows += [_trade_off(task, each, is_base=each is baseline) for each in (baseline, best) if each is not None]
    columns = ("Configuration", "Experiment", "Benchmark", "Accuracy", "Drop (points)", "Tokens/s", "Speed-up")
    return table("Accuracy against speed", columns, rows, name="trade_offs")


def _trade_off(task: ReportTask, each: ReportCell, *, is_base: bool) -> list[TableEntry]:
    drop, up = _summary_of(each).paired.drop_points, _summary_of(each).speed_up.smaller
    return [
        cell(f"{each.name} ({'baseline' if is_base else 'fastest'})", each.name),
        cell(task.experiment.name, task.experiment.name),
        cell(task.folder, task.folder),
        number(_summary_of(each).accuracy, ".2f", factor=100, suffix=" %"),
        cell("–") if is_base else number(drop.value, "+.1f", small=interval(drop.low, drop.high, "+.1f")),
        rate_entry(_summary_of(each), ".2f"),
        number(up.value, ".2f", suffix="×", small="" if is_base else interval(up.low, up.high, ".2f")),
    ]


def _log(overview: Overview) -> Block:
    entries = sorted((log_entry(task) for task in overview.tasks), key=lambda each: each.title, reverse=True)
    return {
        "kind": "entries",
        "title": "Experiment log",
        "name": "log",
        "entries": [
            {"title": each.title, "lines": [[label, text, list(below)] for label, text, below in each.lines()]}
            for each in entries
        ],
    }


def _benchmark(tasks: Sequence[ReportTask]) -> list[Block]:
    columns = (
        "Config", "Experiment", "Rules", "Samples", "Accuracy", "Throughput (tokens/s)", "Speed-up", "Total tokens",
        "Total time (h)", "Notes",
    )  # fmt: skip
    rows = [row for task in tasks for row in _benchmark_rows(task)]
    caption = (
        "The speed-up is against a config's own baseline, the smaller one of two measures. Throughput is the median "
        "over the chunks that it is made of; a control does exactly the baseline's work."
    )
    return [
        figure("Accuracy against speed-up", _scatter(tasks), name="accuracy_speed_up"),
        table("Complete results", columns, rows, caption=caption, name="complete"),
    ]


def _benchmark_rows(task: ReportTask) -> Iterator[list[TableEntry]]:
    outcomes = {each.config: each for each in task.verdict().configs}
    for each in task.cells:
        start = [cell(each.name, each.name), cell(task.experiment.name, task.experiment.name)]
        rules = cell(", ".join(each.config.settings) or "no reuse")
        if each.summary is None:
            yield [*start, rules, *[cell("")] * 6, cell(each.state, each.state, small=each.note, tone="open")]
            continue
        up, judged, equal = each.summary.speed_up.smaller, outcomes.get(each.name), each.summary.equal_to
        note = judged.outcome if judged else "baseline"
        yield [
            *start,
            rules,
            number(each.summary.samples, ",.0f"),
            number(each.summary.accuracy, ".2f", factor=100, suffix=" %"),
            rate_entry(each.summary, ".2f"),
            number(up.value, ".2f", suffix="×"),
            number(each.summary.throughput.tokens, ",.0f"),
            number(each.summary.throughput.decode_seconds, ".3g", factor=1 / 3600),
            cell(note, note, small=f"equals {equal}" if equal else ""),
        ]


def _scatter(tasks: Sequence[ReportTask]) -> dict[str, Any]:
    traces = []
    for index, task in enumerate(tasks):
        found = [(each, _summary_of(each).speed_up.smaller) for each in task.done]
        found = [(each, up) for each, up in found if up.value == up.value]
        accuracy = [[100 * share for share in _accuracies(each)] for each, _ in found]
        bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
        traces.append(
            {
                "x": [up.value for _, up in found],
                "y": [each[0] for each in accuracy],
                "error_x": bars
                | {
                    "array": [up.high - up.value for _, up in found],
                    "arrayminus": [up.value - up.low for _, up in found],
                },
                "error_y": bars
                | {
                    "array": [each[2] - each[0] for each in accuracy],
                    "arrayminus": [each[0] - each[1] for each in accuracy],
                },
                "mode": "markers",
                "marker": {"size": 10, "color": in_turn(PALETTE, index), "symbol": in_turn(SYMBOLS, index)},
                "name": plain(task.experiment.name),
                "text": [f"{plain(_label(task, each))}<br>{up.value:.2f}×" for each, up in found],
                "hoverinfo": "text",
            }
        )
    more = {"yaxis": {"ticksuffix": " %"}}
    return {"data": traces, "layout": layout("speed-up against the baseline", "accuracy", **more), "height": 420}


def _accuracies(each: ReportCell) -> list[float]:
    summary = _summary_of(each)
    return [summary.accuracy, *summary.accuracy_interval]


def _summary_of(each: ReportCell) -> Summary:
    assert each.summary is not None, "only what is done is compared"
    return each.summary


def _rate(each: ReportCell) -> float:
    rate = _summary_of(each).rate
    return rate.value if rate else 0.0


def _label(task: ReportTask, each: ReportCell) -> str:
    return f"{each.name} ({task.experiment.name})"
