"""What is stored of a task here: its results, or else its artifacts, summaries of a complete run that are committed."""

import json
from dataclasses import asdict
from pathlib import Path

from stepsaver.bench.audit import Finding
from stepsaver.bench.documents import Summary
from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.folders import task_folder
from stepsaver.bench.store import read_json, read_run
from stepsaver.engine.errors import UsageError
from stepsaver.report.cells import ReportCell, ReportTask, read_report_task
from stepsaver.report.documents import read_documents, without_documents

FINDINGS = "audit.jsonl"
RATES = "rates"  # of the chunks, beside what a summary holds
NO_SAMPLES = "samples are not part of the artifacts"


def read_stored_task(
    experiment: Experiment,
    results: Path,
    task: str,
    *,
    limit: int | None,
    model: str,
    data_dir: Path | None = None,
    with_documents: bool = True,
) -> ReportTask | None:
    """Returns the task's results, else its artifacts; None if no config is done."""
    folder = task_folder(task, limit)
    stored = [read_run(results / folder / config.name) for config in experiment.configs]
    identity = next((each.identity for each in stored if each is not None), None)
    if identity is not None:
        documents = (
            read_documents(experiment, task, limit=limit, model=model, data_dir=data_dir, identity=identity)
            if with_documents
            else without_documents("not asked for")
        )
        found = read_report_task(experiment, results, folder, documents)
        if found.done:
            return found
    return read_artifacts(experiment, results, folder)


def artifacts_folder(experiment: Experiment, results: Path) -> Path:
    """Returns a folder laid out like the results: another model than the experiment's own has a folder of its own."""
    folder = experiment.folder.resolve()
    return folder / "artifacts" / results.resolve().relative_to(folder / "results")


def save_artifacts(task: ReportTask) -> Path:
    """Writes a task's summaries and findings, and returns their folder. Configs that were never run are left out, and a
    clone says so; those that are run in part are refused, because nobody could tell later.
    """
    if task.source == "artifacts":
        raise UsageError(f"{task.folder} has no results here; its artifacts are all there is")
    begun = [cell for cell in task.unfinished if cell.state != "missing"]
    if begun or not task.done:
        names = ", ".join(f"{cell.name} ({cell.state})" for cell in begun or task.unfinished)
        raise UsageError(f"{task.experiment.name}, {task.folder} is not complete: {names}")
    folder = artifacts_folder(task.experiment, task.results) / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    for cell in task.done:
        assert cell.summary is not None, "what is done has a summary"
        rates = [(round(minutes, 2), round(rate, 1)) for minutes, rate in cell.rates]
        write_beside(folder / f"{cell.name}.json", _line({**cell.summary.as_json(), RATES: rates}))
    write_beside(folder / FINDINGS, "".join(_line(asdict(finding)) for finding in task.findings))
    return folder


def _line(content: dict[str, object]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def read_artifacts(experiment: Experiment, results: Path, folder: str) -> ReportTask | None:
    """Returns the task as it was saved; None if nothing was."""
    saved = artifacts_folder(experiment, results) / folder
    cells = tuple(_read_cell(config, saved) for config in experiment.configs_on(folder))
    if not any(cell.summary for cell in cells):
        return None
    documents = without_documents(NO_SAMPLES)
    return ReportTask(experiment, results, folder, cells, _findings(saved), documents, "artifacts")


def _findings(saved: Path) -> tuple[Finding, ...]:
    path = saved / FINDINGS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return tuple(Finding(**json.loads(line)) for line in lines)
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{path} cannot be read; `stepsaver report --save-artifacts` writes it") from None


def _read_cell(config: ConfigSpec, saved: Path) -> ReportCell:
    content = read_json(saved / f"{config.name}.json")
    rates = (content or {}).pop(RATES, ())
    summary = Summary.read(content)
    if summary is None:
        return ReportCell(config, "missing", "not among the artifacts")
    return ReportCell(config, "done", "", summary, tuple((minutes, rate) for minutes, rate in rates))
