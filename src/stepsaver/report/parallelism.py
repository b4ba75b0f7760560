"""The field's own measures: tokens per forward (TPF) and accuracy under parallelism (AUP), with what they leave out.

TPF counts forwards of one sample, whatever each costs: a step of 32 rows and one of 8 weigh the same. Operations per
token therefore stand beside it. Where texts are scored no token is generated, and there is no TPF.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

from stepsaver.bench.documents import CostTotals, Summary
from stepsaver.bench.store import CellFiles
from stepsaver.bench.summarise import cost_totals, tokens_before_stop
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.report.blocks import Block, named, number, table
from stepsaver.report.cells import ReportTask

PENALTY, MOST_LOSS = 3.0, 5.0  # d3LLM's: how lost accuracy weighs, and how many points may be lost at all
COLUMNS = ("config", "accuracy", "TPF", "TPF with commits", "GFLOP per token")
TPF_CAPTION = (
    "TPF: tokens before the stop over denoising forwards, each sample's own; with commits: over all its forwards but "
    "the prefill, commits and verifications included."
)
CAPTION = (
    f"{TPF_CAPTION} AUP is d3LLM's area under accuracy against TPF, weighted down where accuracy is lost; it does not "
    "know what a forward costs, which operations per token do."
)


class TokensPerForward(NamedTuple):
    tokens_per_step: float
    tokens_per_forward: float  # commits and verifications included

    def __str__(self) -> str:
        return f"TPF {self.tokens_per_step:.2f}, with commits {self.tokens_per_forward:.2f}"


def tokens_per_forward(tokens: float | None, cost: CostTotals) -> TokensPerForward | None:
    """Returns None if no tokens were generated or no denoising step was taken."""
    forwards = sum(each["steps"] for kind, each in cost.by_kind.items() if kind not in ("prefill", "reused"))
    if not tokens or not cost.denoising_steps or not forwards:
        return None
    return TokensPerForward(tokens / cost.denoising_steps, tokens / forwards)


def stored_tokens_per_forward(cell: CellFiles, chunks: Collection[int]) -> TokensPerForward | None:
    """Returns that of some stored chunks of a cell, which need no summary."""
    records = [record for chunk in chunks for record in cell.records.get(chunk, ())]
    timings = [timing for timing in cell.own_timings if timing.chunk in chunks]
    return tokens_per_forward(tokens_before_stop(records), cost_totals(timings))


def parallelism_of(summary: Summary) -> TokensPerForward | None:
    """Returns None for a config whose texts were scored, that has no tokens or that took no denoising step."""
    return tokens_per_forward(summary.tokens_before_stop, summary.cost)


def accuracy_under_parallelism(points: Sequence[tuple[float, float]], best: float) -> float:
    """Returns the AUP of pairs of TPF and accuracy in percent; `best` is the highest accuracy on the task.

    As d3LLM defines it (hao-ai-lab, 2025): the first point's area in full, then trapezoids over accuracies y weighted
    by min(exp(-3 (1 - y / best)), 1); points more than five below the first are left out.
    """
    ordered = sorted(points)
    kept = [(rho, y) for rho, y in ordered if y >= ordered[0][1] - MOST_LOSS]

    def weighted(y: float) -> float:
        return y * min(exp(-PENALTY * (1 - y / best)), 1.0)

    area = kept[0][0] * kept[0][1]
    return area + sum((x2 - x1) * (weighted(y1) + weighted(y2)) / 2 for (x1, y1), (x2, y2) in pairwise(kept))


def aup_lines(task: ReportTask) -> list[str]:
    """Returns the AUP of every set of rules that was run with several thresholds, the configs else being equal."""
    measured = {each.config: found for each in task.summaries if (found := parallelism_of(each))}
    accuracy = {each.config: 100 * each.accuracy for each in task.summaries}
    sweeps: dict[str, list[str]] = {}
    for cell in task.done:
        policy = cell.config.decoder(task.experiment.spec.decoding).policy
        if cell.name in measured and isinstance(policy, Threshold) and policy.at_most is None:
            sweeps.setdefault(", ".join(cell.config.rules) or "no reuse", []).append(cell.name)
    lines, best = [], max((accuracy[name] for name in measured), default=0.0)
    for rules, names in sweeps.items():
        if len({measured[name].tokens_per_step for name in names}) > 1:
            areas = [
                accuracy_under_parallelism([(measured[name][place], accuracy[name]) for name in names], best)
                for place in (0, 1)
            ]
            lines.append(f"AUP of {rules} over {len(names)} thresholds: {areas[0]:.1f}, with commits {areas[1]:.1f}")
    return lines


def parallelism_table(task: ReportTask) -> Block:
    """Returns a row per config that generates text."""
    rows = [
        [
            named(each.config),
            number(each.accuracy, ".1f", factor=100, suffix=" %"),
            number(found.tokens_per_step, ".2f"),
            number(found.tokens_per_forward, ".2f"),
            number(each.cost.flops / (each.tokens_before_stop or 1), ".4f", factor=1e-9),
        ]
        for each in task.summaries
        if (found := parallelism_of(each))
    ]
    caption = " ".join([CAPTION, *(f"{line}." for line in aup_lines(task))])
    return table("Parallelism", COLUMNS, rows, caption=caption, name="parallelism", is_folded=True)
