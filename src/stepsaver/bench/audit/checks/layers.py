"""The layer groups of a grid have equal size, and every layer that they name exists."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.engine.errors import UsageError

ORDER = 6


def findings(task: TaskEvidence) -> Iterator[Finding]:
    layers = next((cell.identity.layers for cell in task.cells), None)
    try:
        read_experiment(task.experiment.folder, layers=layers)
    except UsageError as error:
        yield Finding("invalid", "layers", str(error))
