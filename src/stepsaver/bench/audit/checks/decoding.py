"""Every config was decoded as its experiment declares."""

from collections.abc import Iterator
from typing import Any

from stepsaver.bench.audit.evidence import CellEvidence, Finding, TaskEvidence
from stepsaver.bench.experiment import OWN_DECODING, Experiment

ORDER = 8


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        effective = cell.identity.decoding
        declared = declared_decoding(task.experiment, cell)
        if not task.decoder(cell).has_blocks:
            declared = {name: value for name, value in declared.items() if name not in ("block_size", "sub_block_size")}
        wrong = [name for name, value in declared.items() if getattr(effective, name, None) != value]
        if cell.identity.decoder != task.policy(cell):
            wrong.append("policy")
        if wrong:
            yield Finding("invalid", "decoding", f"{cell.name} did not run with the declared {', '.join(wrong)}")
    estimators = {str(cell.identity.estimator) for cell in task.cells}
    if len(estimators) > 1:
        yield Finding("invalid", "decoding", f"configs were scored by different estimators: {', '.join(estimators)}")


def declared_decoding(experiment: Experiment, cell: CellEvidence) -> dict[str, Any]:
    """Returns the declared settings: the experiment's file or its defaults, overridden by the command line and then by
    the config. Settings that are left to the model are not declared.
    """
    names = ("block_size", "sub_block_size", "mask_id", "prefix_cache", "block_cache")
    declared = {name: getattr(experiment.spec.decoding, name) for name in names}
    declared |= {name: value for name, value in cell.given.items() if hasattr(cell.identity.decoding, name)}
    declared |= {name: value for name in OWN_DECODING if (value := getattr(cell.config, name)) is not None}
    return {name: value for name, value in declared.items() if value is not None}
