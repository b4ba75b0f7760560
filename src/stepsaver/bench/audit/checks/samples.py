"""Every config has every sample once, with the same prompts."""

from collections import Counter
from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 1


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        stored = len({(each.key.task, each.key.document) for each in cell.records})
        wanted = cell.summary.samples if cell.summary else stored
        if stored != wanted:
            yield Finding("invalid", "samples", f"{cell.name} has {stored} samples, its summary is of {wanted}")
        repeated = [str(key) for key, count in Counter(each.key for each in cell.records).items() if count > 1]
        if repeated:
            yield Finding("invalid", "samples", f"{cell.name} has {len(repeated)} samples twice, such as {repeated[0]}")
    baselines = task.baselines()
    for cell, baseline in [*task.others(), *((each, baselines[0]) for each in baselines[1:])]:
        ours = {each.key: each.digest for each in cell.records}
        theirs = {each.key: each.digest for each in baseline.records}
        if ours.keys() != theirs.keys():
            odd = sorted(map(str, ours.keys() ^ theirs.keys()))
            yield Finding(
                "invalid", "samples", f"{cell.name} and {baseline.name} differ in {len(odd)} samples, such as {odd[0]}"
            )
        changed = [str(key) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
        if changed:
            yield Finding("invalid", "samples", f"{cell.name} had another prompt than {baseline.name} for {changed[0]}")
