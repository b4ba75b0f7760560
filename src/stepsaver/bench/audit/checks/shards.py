"""Shards that share a machine slow each other down: their timings say nothing about a config."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 12


def findings(task: TaskEvidence) -> Iterator[Finding]:
    shared = [cell.name for cell in task.cells if any(not each.comparable for each in cell.timings)]
    if shared:
        yield Finding(
            "remark",
            "shards",
            f"{len(shared)} configs have chunks that were timed by concurrent shards on one machine; "
            "no speed-up counts them",
        )
