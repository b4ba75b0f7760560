"""Rules that amount to the same give the same answers; others change the answers, or at least the work."""

from collections.abc import Iterator
from itertools import combinations

from stepsaver.bench.audit.evidence import CellEvidence, Finding, TaskEvidence

ORDER = 4


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for one, other in combinations(task.computed, 2):
        same = one.answers() == other.answers()
        if not same and task.cannot_differ(one, other):
            yield Finding(
                "invalid", "identical", f"{one.name} and {other.name} have rules that amount to the same and yet differ"
            )
        if same and one.deciding != other.deciding and one.records:
            unapplied = _work(one) == _work(other) and not one.may_leave_out_the_same(other)
            yield Finding(
                "invalid" if unapplied else "remark",
                "identical",
                f"{one.name} and {other.name} have different rules and identical answers"
                + (": the rules were not applied" if unapplied else ""),
            )


def _work(cell: CellEvidence) -> tuple[float, float]:
    return sum(each.row_layers for each in cell.timings), sum(each.flops for each in cell.timings)
