"""Pairs a config's chunks with its baseline's: the speed-up that follows, and how sure it is."""

from collections.abc import Sequence

from stepsaver.bench.experiment.conditions import Criterion
from stepsaver.bench.judging.statistics import bootstrap_p
from stepsaver.bench.results.timing import Timing

Pair = tuple[Timing, Timing]  # of a config and of its baseline


def chunk_pairs(timings: Sequence[Timing], baseline: Sequence[Timing]) -> list[Pair]:
    """Returns the timings of config and baseline on a chunk in one session, unless they shared their machine."""
    theirs = {each.key: each for each in baseline if each.comparable}
    ours = [each for each in timings if each.comparable]
    return [(each, theirs[each.key]) for each in ours if each.key in theirs]


def speed_ups(pairs: list[Pair]) -> dict[str, list[float]]:
    """Returns a ratio per pair, by tokens per second and by seconds per sample: garbage raises the first, short answers
    the second.
    """
    rates = [(ours.tokens / ours.seconds) / (base.tokens / base.seconds) for ours, base in pairs]
    times = [(base.seconds / base.samples) / (ours.seconds / ours.samples) for ours, base in pairs]
    return {"tokens_per_s": rates, "seconds_per_sample": times}


def confirmation_p(ratios: dict[str, list[float]], drops: list[float], wanted: Criterion) -> float:
    """Returns the p-value against "it does not meet both bounds": the largest of those against each bound."""
    if not drops or not all(ratios.values()):
        return 1.0
    up, drop = wanted.speed_up, wanted.drop_points
    values = [0.0]  # a bound on the measured value itself is no hypothesis to be tested
    if not up.is_measured:
        values += [bootstrap_p(each, up.bound, statistic="median", above=up.sign == ">") for each in ratios.values()]
    if not drop.is_measured:
        values.append(bootstrap_p(drops, drop.bound / 100, statistic="mean", above=drop.sign == ">"))
    return max(values)


def predicted_here(pairs: Sequence[Pair]) -> float | None:
    """Returns the speed-up that the row costs of each pair's machine predict; None if they were not measured."""
    known = [pair for pair in pairs if all(each.predicted_seconds and each.tokens for each in pair)]
    if not known:
        return None
    ours, base = (
        sum(each.predicted_seconds or 0.0 for each in side) / sum(each.tokens for each in side)
        for side in zip(*known, strict=True)
    )
    return base / ours
