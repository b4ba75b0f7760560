"""A config that took over another one's answers was itself computed on some requests, and agreed."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 3


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        if cell.summary is None or not cell.summary.equal_to:
            continue
        leader, checked = cell.summary.equal_to, cell.summary.spot_check
        if checked and checked.different:
            yield Finding("invalid", "equal", f"{cell.name} is not equal to {leader} after all: {checked.different[0]}")
        else:
            rules = ", ".join(each.rule for each in cell.summary.inert_rules) or "its rules"
            yield Finding("remark", "equal", f"{cell.name} equals {leader}: {rules} cannot act on this task")
