"""A config whose rules cannot act gives the baseline's answers to the last token."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 2


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell, baseline in task.others():
        if not cell.acting and task.cannot_differ(cell, baseline) and cell.answers() != baseline.answers():
            yield Finding("invalid", "neutral", f"{cell.name} reuses nothing and yet differs from {baseline.name}")
