"""A text ends with its stop token: nothing after it is counted."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 9


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        stops = set(cell.identity.get("decoding", {}).get("stop_ids", ()))
        behind = [str(each.key) for each in cell.records if each.path == "generation" and stops & set(each.ids[:-1])]
        if behind:
            yield Finding("invalid", "tokens", f"{cell.name} counts tokens behind the stop token, as in {behind[0]}")
