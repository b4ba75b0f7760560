"""The field's own measures: tokens per forward (TPF) and accuracy under parallelism (AUP), with what they leave out.

TPF counts forwards of one sample, whatever each costs: a step of 32 rows and one of 8 weigh the same. Operations per
token therefore stand beside it. Where texts are scored no token is generated, and there is no TPF.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

import yaml

from stepsaver.bench.documents import CostTotals, Summary
from stepsaver.bench.experiment import OWN_DECODING
from stepsaver.bench.store import CellFiles
from stepsaver.bench.summarise import cost_totals, tokens_before_stop
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.report.blocks import Block, named, number, table
from stepsaver.report.cells import ReportCell, ReportTask

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


def sweeps(task: ReportTask) -> dict[str, list[str]]:
    """Returns the configs that generate text, by what they have in common: everything but the threshold."""
    found: dict[str, list[str]] = {}
    for cell in task.done:
        if cell.summary is not None and parallelism_of(cell.summary):
            found.setdefault(_but_for_the_threshold(task, cell), []).append(cell.name)
    return found


def _but_for_the_threshold(task: ReportTask, cell: ReportCell) -> str:
    config, policy = cell.config, cell.config.decoder(task.experiment.spec.decoding).policy
    own = [f"{name}={value}" for name in (*OWN_DECODING, "join") if (value := getattr(config, name)) is not None]
    if isinstance(policy, Threshold):
        own += [f"at_most={policy.at_most}"] if policy.at_most is not None else []
        return ", ".join([*(config.rules or ["no reuse"]), *own])
    return ", ".join([*config.settings, *own])


def aup_lines(task: ReportTask) -> list[str]:
    """Returns the AUP of every set of configs that differ in their threshold alone."""
    measured = {each.config: found for each in task.summaries if (found := parallelism_of(each))}
    accuracy = {each.config: 100 * each.accuracy for each in task.summaries}
    lines, best = [], max((accuracy[name] for name in measured if not task.experiment.is_reference(name)), default=0.0)
    for what, names in sweeps(task).items():
        if len({measured[name].tokens_per_step for name in names}) > 1:
            areas = [
                accuracy_under_parallelism([(measured[name][place], accuracy[name]) for name in names], best)
                for place in (0, 1)
            ]
            lines.append(f"AUP of {what} over {len(names)} thresholds: {areas[0]:.1f}, with commits {areas[1]:.1f}")
    return lines


def leaderboard(tasks: Sequence[ReportTask]) -> str:
    """Returns d3LLM's file: by task and method, pairs of tokens per forward (all but prefills) and accuracy in %."""
    content: dict[str, dict[str, list[list[float]]]] = {}
    for task in tasks:
        by_name = {each.config: each for each in task.summaries}
        for what, names in sweeps(task).items():
            found = [(parallelism_of(by_name[name]), by_name[name].accuracy) for name in names]
            pairs = [[round(each.tokens_per_forward, 4), round(100 * right, 2)] for each, right in found if each]
            content.setdefault(task.folder, {})[names[0] if len(names) == 1 else what] = sorted(pairs)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)


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
