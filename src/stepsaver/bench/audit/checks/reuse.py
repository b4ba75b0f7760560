"""A rule that acts executes fewer row-layers per denoising step than the baseline, commits included."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import CellEvidence, Finding, TaskEvidence
from stepsaver.engine.trace import COMPUTED_STEPS

ORDER = 5
COUNTED = (*COMPUTED_STEPS, "commit")  # some rules leave out nothing but rows of commits


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell, baseline in task.others():
        ours, theirs = _work_per_step(cell), _work_per_step(baseline)
        could = not cell.may_leave_out_the_same(baseline) and cell.has_the_caches_of(baseline)
        if cell.acting and could and ours is not None and theirs is not None and ours >= theirs:
            yield Finding(
                "invalid",
                "reuse",
                f"{cell.name} claims reuse and runs {ours:.0f} row-layers a step with commits, not under {theirs:.0f}",
            )


def _work_per_step(cell: CellEvidence) -> float | None:
    steps = sum(each.denoising_steps for each in cell.timings)
    kinds = [figures for each in cell.timings for kind, figures in each.by_kind.items() if kind in COUNTED]
    return sum(figures["row_layers"] for figures in kinds) / steps if steps else None
