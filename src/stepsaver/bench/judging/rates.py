"""Tokens per second by chunk: the rate of a config, and the chunks that were disturbed.

A rate is the median over chunks, so that one chunk during which the machine was busy with something else does not move
it. The rate over the whole run is kept beside it: if the two disagree, something was wrong with the timings.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from stepsaver.bench.judging.statistics import Interval, median_interval
from stepsaver.bench.results.timing import Timing

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
