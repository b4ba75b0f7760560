"""Texts are about as long as the baseline's, and hit the token limit about as often."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 10
RUNAWAY = 1.5  # times the baseline's tokens per sample
CUT_SHARE = 0.1  # by which the share of samples at the limit may exceed the baseline's


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell, baseline in task.others():
        if not cell.records or not baseline.records or cell.records[0].path != "generation":
            continue
        ours, theirs = (sum(r.tokens for r in each.records) / len(each.records) for each in (cell, baseline))
        cut, base_cut = (
            sum(r.finish == "length" for r in each.records) / len(each.records) for each in (cell, baseline)
        )
        if theirs and not 1 / RUNAWAY < ours / theirs < RUNAWAY:
            yield Finding(
                "remark", "texts", f"{cell.name} writes {ours:.0f} tokens a sample, {baseline.name} {theirs:.0f}"
            )
        if cut > base_cut + CUT_SHARE:
            yield Finding(
                "remark",
                "texts",
                f"{cell.name} hits the token limit in {cut:.0%} of samples, {baseline.name} in {base_cut:.0%}",
            )
