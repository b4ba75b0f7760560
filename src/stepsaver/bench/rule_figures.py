"""What each rule is worth by measurement, read from the summaries that are committed with the experiments."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stepsaver.bench.documents import Summary
from stepsaver.bench.statistics import Interval
from stepsaver.bench.store import read_summary

MOST_POINTS = 5.0  # the source's bound: what costs more accuracy is no gain


class RuleFigure(NamedTuple):
    """A config against its baseline on one task."""

    experiment: str
    config: str
    task: str
    samples: int
    batch_size: int
    rules: tuple[str, ...]
    speed_up: Interval
    drop_points: Interval

    def __str__(self) -> str:
        up, drop, others = self.speed_up, self.drop_points, len(self.rules) - 1
        how = "alone" if not others else f"with {others} other rule{'s' * (others > 1)}"
        return (
            f"batch {self.batch_size}, {how}: {up.value:.2f}x [{up.low:.2f}, {up.high:.2f}] "
            f"at a drop of {drop.value:.1f} [{drop.low:.1f}, {drop.high:.1f}] points "
            f"({self.experiment}, {self.config}, {self.samples} samples of {self.task})"
        )


def stored_figures(experiments: Path) -> list[RuleFigure]:
    """Returns a figure for every config that has rules and its baseline's policy; none if there are no artifacts."""
    folders = sorted(path for path in experiments.glob("*/artifacts/*") if path.is_dir())
    return [figure for folder in folders for figure in _figures_in(folder)]


def _figures_in(folder: Path) -> Iterator[RuleFigure]:
    found = (read_summary(path) for path in sorted(folder.glob("*.json")))
    summaries = {each.config: each for each in found if each is not None}
    for name, summary in summaries.items():
        baseline = summaries.get(summary.baseline)
        if summary.is_baseline or summary.is_reference or baseline is None or not _shows_a_rule(summary):
            continue
        if summary.identity.policy != baseline.identity.policy:
            continue  # what the policy gains must not be credited to a rule
        yield RuleFigure(
            folder.parents[1].name,
            name,
            summary.task,
            summary.samples,
            summary.identity.batch_size,
            tuple(summary.identity.rules),
            summary.speed_up.smaller,
            summary.paired.drop_points,
        )


def _shows_a_rule(summary: Summary) -> bool:
    """Whether its rules acted, and it was timed beside a baseline."""
    acted = summary.identity.rules and not summary.equal_to and not summary.is_control
    return bool(acted) and summary.pairs > 0


def figures_of(rule: str, figures: Sequence[RuleFigure]) -> list[RuleFigure]:
    """Returns a rule's best figure for each batch size, alone and with other rules, each on the largest task it has."""
    ours = [each for each in figures if any(text.partition(":")[0] == rule for text in each.rules)]
    kinds = sorted({(each.batch_size, len(each.rules) > 1) for each in ours})
    groups = [[each for each in ours if (each.batch_size, len(each.rules) > 1) == kind] for kind in kinds]
    return [_best(group) for group in groups]


def _best(group: Sequence[RuleFigure]) -> RuleFigure:
    """Returns, of those with most samples, the fastest that costs less than `MOST_POINTS`, else the cheapest."""
    most = max(each.samples for each in group)
    largest = [each for each in group if each.samples == most]
    affordable = [each for each in largest if each.drop_points.value < MOST_POINTS]
    if affordable:
        return max(affordable, key=lambda each: each.speed_up.value)
    return min(largest, key=lambda each: each.drop_points.value)
