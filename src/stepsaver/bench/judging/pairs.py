"""A config's chunks beside its baseline's: what the speed-up is made of, and how sure it is."""

from collections.abc import Sequence

from stepsaver.bench.experiment.conditions import Criterion
from stepsaver.bench.judging.statistics import bootstrap_p
from stepsaver.bench.results.timing import Timing

Pair = tuple[Timing, Timing]  # of a config and of its baseline


def chunk_pairs(timings: Sequence[Timing], baseline: Sequence[Timing]) -> list[Pair]:
    """Timings of the same chunk in the same session, config and baseline; none of those that shared their machine."""
    theirs = {each.key: each for each in baseline if each.comparable}
    ours = [each for each in timings if each.comparable]
    return [(each, theirs[each.key]) for each in ours if each.key in theirs]


def speed_ups(pairs: list[Pair]) -> dict[str, list[float]]:
    """By tokens per second and by seconds per sample: garbage raises the first, short answers the second."""
    rates = [(ours.tokens / ours.seconds) / (base.tokens / base.seconds) for ours, base in pairs]
    times = [(base.seconds / base.samples) / (ours.seconds / ours.samples) for ours, base in pairs]
    return {"tokens_per_s": rates, "seconds_per_sample": times}


def confirmation_p(ratios: dict[str, list[float]], drops: list[float], wanted: Criterion) -> float:
    """A p-value against "does not meet both bounds": the largest of those against each bound."""
    if not drops or not all(ratios.values()):
        return 1.0
    up, drop = wanted.speed_up, wanted.drop_points
    values = [0.0]  # a bound on what was measured is no hypothesis about the rest
    if not up.is_measured:
        values += [bootstrap_p(each, up.bound, statistic="median", above=up.sign == ">") for each in ratios.values()]
    if not drop.is_measured:
        values.append(bootstrap_p(drops, drop.bound / 100, statistic="mean", above=drop.sign == ">"))
    return max(values)


def predicted_here(pairs: Sequence[Pair]) -> float | None:
    """The speed-up by what rows were measured to take on the machine of each pair; none where nobody measured it."""
    known = [pair for pair in pairs if all(each.predicted_seconds and each.tokens for each in pair)]
    if not known:
        return None
    ours, base = (
        sum(each.predicted_seconds or 0.0 for each in side) / sum(each.tokens for each in side)
        for side in zip(*known, strict=True)
    )
    return base / ours
