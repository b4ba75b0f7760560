"""A task of an experiment as it is stored on this machine: its results, or else the committed artifacts."""

from pathlib import Path

from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import task_folder
from stepsaver.bench.store import read_run
from stepsaver.report.artifacts import read_artifacts
from stepsaver.report.cells import ReportTask, read_report_task
from stepsaver.report.documents import read_documents, without_documents


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
