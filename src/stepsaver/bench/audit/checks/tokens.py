"""A text ends with its stop token: nothing after it is counted."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 9


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        stops = set(cell.identity.decoding.stop_ids)
        after_stop = [
            str(each.key) for each in cell.records if each.path == "generation" and stops & set(each.ids[:-1])
        ]
        if after_stop:
            yield Finding("invalid", "tokens", f"{cell.name} counts tokens after the stop token, as in {after_stop[0]}")
