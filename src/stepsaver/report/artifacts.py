"""Summaries of a complete run, small enough to be committed: a clone can show them without `results/`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepsaver.bench.audit import Finding
from stepsaver.bench.documents import Summary
from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.statistics import Interval
from stepsaver.bench.store import read_json
from stepsaver.bench.stored_costs import read_row_costs, write_row_costs
from stepsaver.engine.errors import UsageError
from stepsaver.report.cells import Details, ReportCell, ReportTask
from stepsaver.report.documents import without_documents

FINDINGS = "audit.jsonl"
NO_SAMPLES = "samples are not part of the artifacts"


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
        content = {**cell.summary.as_json(), "details": _rounded(cell.details)}
        write_beside(folder / f"{cell.name}.json", _line(content))
    if task.row_costs:
        write_row_costs(folder, task.row_costs)
    write_beside(folder / FINDINGS, "".join(_line(asdict(finding)) for finding in task.findings))
    return folder


def _rounded(details: Details) -> dict[str, Any]:
    return asdict(details) | {"rates": [(round(minutes, 2), round(rate, 1)) for minutes, rate in details.rates]}


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def read_artifacts(experiment: Experiment, results: Path, folder: str) -> ReportTask | None:
    """Returns the task as it was saved; None if nothing was."""
    saved = artifacts_folder(experiment, results) / folder
    cells = [_read_cell(config, read_json(saved / f"{config.name}.json")) for config in experiment.configs]
    if not any(cell.summary for cell in cells):
        return None
    lines = (saved / FINDINGS).read_text(encoding="utf-8").splitlines() if (saved / FINDINGS).exists() else []
    try:
        findings = tuple(Finding(**json.loads(line)) for line in lines)
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{saved / FINDINGS} cannot be read; `stepsaver report --save-artifacts` writes it") from None
    return ReportTask(
        experiment,
        results,
        folder,
        tuple(cells),
        findings,
        without_documents(NO_SAMPLES),
        "artifacts",
        read_row_costs(saved),
    )


def _read_cell(config: Any, content: dict[str, Any] | None) -> ReportCell:
    details = (content or {}).pop("details", {})
    summary = Summary.read(content)
    if summary is None:
        return ReportCell(config, "missing", "not among the artifacts")
    if "rate" not in summary.model_fields_set and details.get("median_rate"):  # where artifacts of earlier runs keep it
        summary = summary.model_copy(update={"rate": Interval(*details["median_rate"])})
    return ReportCell(config, "done", "", summary, _details(details))


def _details(content: dict[str, Any]) -> Details:
    return Details(
        rates=[(minutes, rate) for minutes, rate in content.get("rates", ())],
        prefill_seconds=content.get("prefill_seconds", 0.0),
        tokens=tuple(content.get("tokens", ())),
        subjects={name: (right, count) for name, (right, count) in content.get("subjects", {}).items()},
    )
