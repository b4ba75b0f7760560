"""Tokens per second by chunk: the rate of a config, and the chunks that were disturbed.

A rate is the median over chunks, so that one chunk during which the machine was busy with something else does not move
it. The rate over the whole run is kept beside it: if the two disagree, something was wrong with the timings.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from stepsaver.bench.documents import SpeedUp, Timing
from stepsaver.bench.experiment import Criterion
from stepsaver.bench.statistics import (
    UNKNOWN,
    Interval,
    Mean,
    PairedScores,
    Ratio,
    mean_of,
    median_interval,
    pooled_sessions,
    ratio_interval,
    ratio_p,
    spread_of,
)
from stepsaver.engine.cost import entry_flops
from stepsaver.engine.curve import Curve
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.trace import ForwardRecord, SampleStep

SLOW = 0.5  # the share of its config's median rate below which a chunk is slow


def chunk_rate(timing: Timing) -> float | None:
    """Returns None for a chunk that took no time or shared its machine: it enters no figure."""
    return timing.tokens / timing.seconds if timing.seconds and timing.comparable else None


def chunk_rates(timings: Sequence[Timing]) -> list[float]:
    return [rate for rate in map(chunk_rate, timings) if rate is not None]


def median_rate(timings: Sequence[Timing]) -> Interval | None:
    rates = chunk_rates(timings)
    return median_interval(rates) if rates else None


class Slow(NamedTuple):
    """A timing under half of its config's median rate."""

    config: str
    chunk: int
    session: str
    is_disturbed: bool  # another config was not slow on the same chunk in the same session


def slow_chunks(timings: Mapping[str, Sequence[Timing]]) -> list[Slow]:
    """Returns the slow timings, config by config. If another config was not slow, the machine was disturbed."""
    at: dict[tuple[str, int], dict[str, bool]] = {}
    for config, mine in timings.items():
        rates = chunk_rates(mine)
        for timing in mine:
            rate = chunk_rate(timing)
            if rate is not None:
                at.setdefault((timing.session, timing.chunk), {})[config] = rate < SLOW * median(rates)
    return [
        Slow(config, chunk, session, is_disturbed=not all(slow.values()))
        for config in timings
        for (session, chunk), slow in at.items()
        if slow.get(config)
    ]


Pair = tuple[Timing, Timing]  # of a config and of its baseline


def chunk_pairs(timings: Sequence[Timing], baseline: Sequence[Timing]) -> list[Pair]:
    """Returns the timings of config and baseline on a chunk in one session, unless they shared their machine."""
    theirs = {each.key: each for each in baseline if each.comparable}
    ours = [each for each in timings if each.comparable]
    return [(each, theirs[each.key]) for each in ours if each.key in theirs]


class Ratios(NamedTuple):
    """By how much a config is faster on each chunk, by both measures."""

    tokens_per_s: list[Ratio]  # garbage raises it
    seconds_per_sample: list[Ratio]  # short answers raise it


def speed_ups(pairs: Sequence[Pair]) -> Ratios:
    rates = [(ours.tokens / ours.seconds) / (base.tokens / base.seconds) for ours, base in pairs]
    times = [(base.seconds / base.samples) / (ours.seconds / ours.samples) for ours, base in pairs]
    keys = [(ours.chunk, ours.process) for ours, _ in pairs]
    return Ratios(*([Ratio(*key, each) for key, each in zip(keys, found, strict=True)] for found in (rates, times)))


class Faster(NamedTuple):
    """The mean log ratio of a config by each measure; None if no pair was timed."""

    tokens_per_s: Mean | None
    seconds_per_sample: Mean | None

    def stored(self) -> SpeedUp:
        found = {name: UNKNOWN if mean is None else ratio_interval(mean) for name, mean in self._asdict().items()}
        return SpeedUp(**found)

    def p_value(self, bound: float, *, above: bool) -> float:
        return max(1.0 if mean is None else ratio_p(mean, bound, above=above) for mean in self)


def compare_speeds(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Faster]:
    """Returns how much faster each config is. What sessions add is pooled over the configs, for each measure."""
    ratios = {name: speed_ups(each) for name, each in pairs.items()}
    itself = {name for name, each in pairs.items() if all(ours is base for ours, base in each)}
    found: dict[str, dict[str, Mean | None]] = {name: dict.fromkeys(Faster._fields) for name in pairs}
    for measure in Faster._fields:
        spreads = {name: spread_of(of_config) for name, each in ratios.items() if (of_config := getattr(each, measure))}
        sessions = pooled_sessions(spread for name, spread in spreads.items() if name not in itself)
        for name, spread in spreads.items():
            found[name][measure] = Mean(0.0, 0.0, 1) if name in itself else mean_of(spread, sessions)
    return {name: Faster(**each) for name, each in found.items()}


def confirmation_p(faster: Faster, drop: PairedScores, wanted: Criterion) -> float:
    """Returns the p-value against "it does not meet both bounds": the larger of those against each bound."""
    up, points = wanted.speed_up, wanted.drop_points
    of_speed = faster.p_value(up.bound, above=up.sign == ">")
    return max(of_speed, drop.p_value(points.bound / 100, above=points.sign == ">"))


def predicted_seconds(curve: Curve, config: ModelConfig, records: Iterable[ForwardRecord]) -> float:
    """Returns what forwards like these take. What rules leave out counts by its operations, as so many positions less,
    and a layer that no position runs is not there.
    """
    return sum(_forward_seconds(curve, config, record) for record in records)


def _forward_seconds(curve: Curve, config: ModelConfig, record: ForwardRecord) -> float:
    running = [entry for entry in record.entries if entry.rows]
    if not running:
        return 0.0
    whole = [_whole(each, config.layers * each.rows) for each in running]
    run, possible = (sum(entry_flops(config, entry) for entry in entries) for entries in (running, whole))
    positions = sum(entry.rows for entry in running)
    before = sum(entry.rows * max(entry.context - entry.rows, 0) for entry in running) / positions
    layers = max(record.layers) / config.layers
    seconds = layers * curve.seconds(positions * run / possible / layers, before)
    return seconds + sum(curve.seconds(each.recomputed_context, 0) for each in running if each.recomputed_context)


def _whole(entry: SampleStep, run: int) -> SampleStep:
    """Returns the step as it is where all its positions run in every layer and are read."""
    return entry._replace(attention_run=run, keys_values_run=run, mlp_run=run, head_rows=entry.rows)


def predicted_speed_up(
    pairs: Sequence[Pair], timings: Sequence[Timing], baseline: Sequence[Timing]
) -> tuple[float | None, Literal["curve", "operations"]]:
    """Returns the speed-up in tokens per second that what forwards were measured to cost predicts, where that was
    measured, else the operations executed; and which of the two it is.
    """
    known = [pair for pair in pairs if all(each.predicted_seconds and each.tokens for each in pair)]
    if known:
        ours, base = zip(*known, strict=True)
        seconds = [sum(each.predicted_seconds or 0.0 for each in side) for side in (ours, base)]
        return _ratio(seconds, [ours, base]), "curve"
    return _ratio([sum(each.flops for each in side) for side in (timings, baseline)], [timings, baseline]), "operations"


def _ratio(costs: Sequence[float], sides: Sequence[Sequence[Timing]]) -> float | None:
    """Returns how many times as much the second side costs per token; None if nothing was decoded."""
    (cost, base_cost), (tokens, base_tokens) = costs, (sum(each.tokens for each in side) for side in sides)
    return (base_cost / base_tokens) / (cost / tokens) if tokens and base_tokens and cost else None
