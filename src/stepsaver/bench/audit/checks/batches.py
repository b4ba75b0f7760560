"""A few samples, decoded again alone, give what they gave in their batch; rounding at a near-tie is the only excuse."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 14


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        checked = cell.summary.batch_invariance if cell.summary else None
        if checked and checked.different:
            yield Finding(
                "invalid",
                "batches",
                f"{cell.name}: {checked.different} of {checked.samples} samples differ when decoded alone",
            )
