"""What a report is compared with: another experiment, another model's results, or an earlier run."""

from dataclasses import dataclass
from pathlib import Path

from stepsaver.bench.experiment import Experiment
from stepsaver.bench.experiment_file import FILE
from stepsaver.bench.folders import experiment_names, find_experiment, results_folder
from stepsaver.engine.errors import UsageError
from stepsaver.report.artifacts import read_artifacts
from stepsaver.report.cells import ReportTask, read_report_cell, read_report_task
from stepsaver.report.documents import TaskDocuments
from stepsaver.report.published_numbers import published_names

PREVIOUS = "previous"


@dataclass(frozen=True)
class Other:
    """What is compared with: another folder of `results`, or with `run`, a run in `previous/` of the same folder."""

    name: str
    experiment: Experiment
    results: Path
    run: str | None = None

    def read(self, folder: str, documents: TaskDocuments) -> ReportTask | None:
        """Returns the other side of a task, if it has one."""
        if self.run is not None:
            return self._previous(folder, documents)
        task = read_report_task(self.experiment, self.results, folder, documents)
        return task if task.done else read_artifacts(self.experiment, self.results, folder)

    def _previous(self, folder: str, documents: TaskDocuments) -> ReportTask | None:
        cells = []
        for config in self.experiment.configs:
            ending = "" if self.run == PREVIOUS else self.run
            runs = sorted((self.results / folder / PREVIOUS).glob(f"{config.name}-{ending}*"), key=_age)
            found = [each for run in runs if (each := read_report_cell(config, run))]
            cells += found[-1:]
        return ReportTask(self.experiment, self.results, folder, tuple(cells), (), documents) if cells else None


def _age(path: Path) -> float:
    return path.stat().st_mtime


def find_other(experiment: Experiment, results: Path, name: str) -> Other:
    """Finds it by the name of an experiment, of a model with results or of a run; `previous`: each config's last."""
    if name in experiment_names() or (Path(name) / FILE).exists():
        other = find_experiment(name)
        return Other(other.name, other, results_folder(other, other.spec.model))
    other_model = results_folder(experiment, name)
    if other_model.is_dir() and other_model != results:
        return Other(name, experiment, other_model)
    runs = {run.name.rpartition("-")[2] for run in results.glob(f"*/{PREVIOUS}/*")}
    if name == PREVIOUS or name in runs:
        return Other(f"run {name}" if name != PREVIOUS else "previous run", experiment, results, run=name)
    known = [*published_names(), *experiment_names(), *sorted(runs)]
    raise UsageError(f"nothing to compare with is called {name!r}; there are {', '.join(known) or 'none'}")
