"""Every line and document agrees with its checksum, and names the run whose folder it is in."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence
from stepsaver.bench.store import IDENTITY

ORDER = 0
NAMED = 3  # faults of a config that are listed one by one


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        if cell.faults:
            more = f"; and {len(cell.faults) - NAMED} more" if len(cell.faults) > NAMED else ""
            yield Finding("invalid", "integrity", f"{cell.name}: {'; '.join(cell.faults[:NAMED])}{more}")
    for name in task.unidentified:
        yield Finding("invalid", "integrity", f"{name} has results and no {IDENTITY} that says which run they are of")
