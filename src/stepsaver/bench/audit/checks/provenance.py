"""All configs of a task ran on one machine with the same code."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 7
COMPARED = (
    "source", "kernels", "weights", "device", "dtype", "libraries", "model", "batch_size", "metric", "token_limit",
)  # fmt: skip


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for name in COMPARED:
        values = {str(getattr(cell.identity, name)) for cell in task.cells}
        if len(values) > 1:
            yield Finding("invalid", "provenance", f"configs differ in {name}: {' and '.join(sorted(values))}")
    commits = {str(cell.git.get("commit")) for cell in task.cells}
    if len(commits) > 1:
        yield Finding("remark", "provenance", f"configs were begun at {len(commits)} commits, with the same code")
    dirty = [cell.name for cell in task.cells if cell.git.get("dirty")]
    if dirty:
        yield Finding(
            "remark", "provenance", f"{len(dirty)} configs were begun while src/ had changes that no commit holds"
        )
