"""What is stored of an experiment, as a report sees it: a cell per config and task, whatever state it is in."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from stepsaver.bench.audit import CellEvidence, Finding, TaskEvidence, audit, read_evidence
from stepsaver.bench.documents import Summary, Timing
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.folders import logs_folder
from stepsaver.bench.jobs import job_states
from stepsaver.bench.store import IDENTITY, SUMMARY, read_cell_files, read_run, read_scores, read_summary
from stepsaver.bench.verdict import Verdict, judge
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestRecord
from stepsaver.report.documents import DocumentKey, TaskDocuments, without_documents

State = Literal["done", "running", "incomplete", "failed", "missing"]


@dataclass(frozen=True)
class ReportCell:
    """One config on one task. A summary and rates are there if it is done."""

    config: ConfigSpec
    state: State
    note: str = ""
    summary: Summary | None = None
    rates: tuple[tuple[float, float], ...] = ()  # of its chunks: minutes since the first one, tokens/s
    records: tuple[RequestRecord, ...] = ()
    scores: dict[DocumentKey, float] = field(default_factory=dict)  # how right each document's answer is
    timings: tuple[Timing, ...] = ()  # all that may count for a speed-up

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(frozen=True)
class ReportTask:
    """All configs of an experiment on one task; `folder` also names the limit."""

    experiment: Experiment
    results: Path
    folder: str
    cells: tuple[ReportCell, ...]
    findings: tuple[Finding, ...]
    documents: TaskDocuments
    source: Literal["results", "artifacts"] = "results"

    @property
    def model(self) -> str:
        """The model's name as it was given; another model than the experiment's own has a folder under its name."""
        is_own = self.results.resolve() == self.experiment.folder.resolve() / "results"
        return self.experiment.spec.model if is_own else self.results.name.replace("__", "/")

    @property
    def done(self) -> list[ReportCell]:
        return [cell for cell in self.cells if cell.summary is not None]

    @property
    def summaries(self) -> list[Summary]:
        return [cell.summary for cell in self.cells if cell.summary is not None]

    def by_baseline(self) -> list[tuple[Summary | None, list[Summary]]]:
        """Returns what is done: each baseline, None if it is not, with the configs that are judged against it."""
        done = {each.config: each for each in self.summaries}
        names = self.experiment.baselines
        shown = [each for each in done if not self.experiment.is_reference(each)]
        groups = {name: [each for each in shown if self.experiment.baseline_of(each) == name] for name in names}
        return [
            (done.get(name), [done[each] for each in group if each != name]) for name, group in groups.items() if group
        ]

    @property
    def unfinished(self) -> list[ReportCell]:
        return [cell for cell in self.cells if cell.summary is None]

    def verdict(self) -> Verdict:
        return judge(self.summaries, self.experiment.success_of)


def read_report_task(experiment: Experiment, results: Path, folder: str, documents: TaskDocuments) -> ReportTask:
    """Reads a task's cells. One that is damaged or missing does not keep the rest from being shown."""
    stored = read_evidence(experiment, results, folder)
    finished = replace(stored, cells=tuple(cell for cell in stored.cells if cell.summary is not None))
    return _report_task(stored, results, _findings(finished), documents)


def read_audited_task(experiment: Experiment, results: Path, folder: str) -> ReportTask | None:
    """Reads a task's cells with an audit of all that is stored, whatever state it is in; None if nothing is."""
    stored = read_evidence(experiment, results, folder)
    if not stored.has_results:
        return None
    return _report_task(stored, results, tuple(audit(stored)), without_documents("not asked for"))


def _report_task(
    stored: TaskEvidence, results: Path, findings: tuple[Finding, ...], documents: TaskDocuments
) -> ReportTask:
    experiment, folder = stored.experiment, stored.task
    by_name = {cell.name: cell for cell in stored.cells}
    whole = max((cell.summary.samples for cell in stored.cells if cell.summary), default=None)
    is_live = _is_locked(results) or _has_jobs(experiment, results)
    cells = []
    for config in experiment.configs_on(folder):
        found, place = by_name.get(config.name), results / folder / config.name
        state, note = _state(found, place, whole, is_live=is_live)
        if found is not None and found.summary is not None:
            done = _finished(config, place, found.summary, found.records, found.timings)
            cells.append(replace(done, timings=found.counting))
        else:
            cells.append(ReportCell(config, state, note, records=found.records if found else ()))
    return ReportTask(experiment, results, folder, tuple(cells), findings, documents)


def _finished(
    config: ConfigSpec, folder: Path, summary: Summary, records: Sequence[RequestRecord], timings: Sequence[Timing]
) -> ReportCell:
    scores = {DocumentKey(*key): score for key, score in read_scores(folder, summary.run_id).items()}
    return ReportCell(config, "done", "", summary, _rates(timings), tuple(records), scores)


def read_report_cell(config: ConfigSpec, folder: Path) -> ReportCell | None:
    """Reads a finished run that is elsewhere, such as under `previous/`; None if that is not what is there."""
    stored, summary = read_run(folder), read_summary(folder / SUMMARY)
    if stored is None or summary is None or summary.run_id != stored.run_id:
        return None
    cell = read_cell_files(folder, stored.run_id)
    return _finished(config, folder, summary, cell.all_records, cell.own_timings)


def _findings(task: TaskEvidence) -> tuple[Finding, ...]:
    """Returns the audit of what is finished; unfinished cells would only be found to lack samples."""
    try:
        return tuple(audit(task)) if task.cells else ()
    except UsageError as error:
        return (Finding("invalid", "experiment", str(error)),)
    except KeyError as missing:
        return (Finding("invalid", "format", f"the results have no {missing}: another version wrote them"),)


def _state(cell: CellEvidence | None, folder: Path, whole: int | None, *, is_live: bool) -> tuple[State, str]:
    if cell is None:
        if (folder / IDENTITY).exists():
            return "failed", f"{IDENTITY} cannot be read"
        return "missing", "not run yet"
    if cell.summary is not None:
        return "done", ""
    if (folder / SUMMARY).exists():
        return "failed", f"{SUMMARY} cannot be read, or belongs to another run"
    samples = len({(record.key.task, record.key.document) for record in cell.records})
    amount = f"{samples} of {whole} samples" if whole else f"{samples} samples"
    if is_live:
        return "running", f"running, {amount} stored"
    return "incomplete", f"stopped, {amount} stored; the next run goes on from there"


def _is_locked(results: Path) -> bool:
    """Whether the process that last took the folder's lock still runs on this machine."""
    try:
        process, _, machine = (results / ".lock").read_text(encoding="utf-8").partition(" on ")
        if machine not in ("", platform.node()):
            return False
        os.kill(int(process), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _has_jobs(experiment: Experiment, results: Path) -> bool:
    """Whether a job for these results is in the cluster's queue."""
    return any(job.is_live and job.results == results for job in job_states(logs_folder(experiment)))


def _rates(timings: Sequence[Timing]) -> tuple[tuple[float, float], ...]:
    in_time = sorted(timings, key=lambda each: each.when)
    return tuple(((each.when - in_time[0].when) / 60, each.tokens / each.seconds) for each in in_time if each.seconds)
