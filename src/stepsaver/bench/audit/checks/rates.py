"""Chunks are timed alike: none was disturbed, configs that do the same work are about as fast, and figures agree."""

from collections.abc import Iterator
from itertools import combinations
from statistics import median

from stepsaver.bench.audit.evidence import CellEvidence, Finding, TaskEvidence
from stepsaver.bench.statistics import Interval
from stepsaver.bench.timings import chunk_rates, median_rate, slow_chunks
from stepsaver.engine.other_work import IDLE_CORES

ORDER = 11
TWINS_DIFFER = 0.25
ABOUT_EQUAL = 0.05


def findings(task: TaskEvidence) -> Iterator[Finding]:
    yield from _slow(task)
    yield from _unlike_twins(task)
    for cell in task.computed:
        yield from _pooled_time(cell)
        yield from _not_idle(cell)
    for cell, baseline in task.others():
        yield from _speed_up(cell, baseline)


def _slow(task: TaskEvidence) -> Iterator[Finding]:
    """Lists disturbed chunks by number, because they can be timed again. A cold start shows as a slow chunk too."""
    found = slow_chunks({cell.name: cell.counting for cell in task.computed})
    for cell in task.computed:
        timed = len(chunk_rates(cell.counting))
        mine = [each for each in found if each.config == cell.name]
        disturbed = [str(each.chunk) for each in mine if each.is_disturbed]
        slow = [str(each.chunk) for each in mine if not each.is_disturbed]
        if disturbed:
            yield Finding(
                "remark",
                "rates",
                f"{cell.name} was disturbed in {len(disturbed)} of {timed} timings, of chunk {', '.join(disturbed)}: "
                "under half of its median rate where a config beside it was not; --repeat-disturbed times them again",
            )
        if slow:
            yield Finding(
                "remark", "rates", f"{cell.name} was slow in {len(slow)} of {timed} timings, of chunk {', '.join(slow)}"
            )


def _unlike_twins(task: TaskEvidence) -> Iterator[Finding]:
    """Twins, configs that do the same work, have to be about equally fast."""
    rates = {cell.name: chunk_rates(cell.timings) for cell in task.computed}
    for one, other in combinations(task.computed, 2):
        alike = one.acting == other.acting and one.is_decoded_as(other) and task.policy(one) == task.policy(other)
        if rates[one.name] and rates[other.name] and alike and one.answers() == other.answers():
            ratio = median(rates[one.name]) / median(rates[other.name])
            if abs(ratio - 1) > TWINS_DIFFER:
                yield Finding(
                    "disturbed",
                    "rates",
                    f"{one.name} and {other.name} do the same work, one at {ratio:.2f} times the rate",
                    (one.name, other.name),
                )


def _pooled_time(cell: CellEvidence) -> Iterator[Finding]:
    """The rate over the whole run is about the median over chunks, unless a few chunks took most of the time.

    "About" is closer than the interval is wide: with four chunks, one of them shorter, the two never agree much better.
    On a quiet machine the interval is narrower than a median is from a mean; what is that close is no fault either.
    """
    summary = cell.summary
    if summary is None or summary.rate is None or summary.chunks_not_comparable:
        return
    rate, pooled = summary.rate, summary.throughput.tokens_per_s
    if pooled is not None and abs(pooled - rate.value) > max(rate.high - rate.low, ABOUT_EQUAL * rate.value):
        yield Finding(
            "disturbed",
            "rates",
            f"{cell.name} has {rate.value:.0f} tokens/s [{rate.low:.0f}, {rate.high:.0f}] as the median over chunks "
            f"and {pooled:.0f} over the whole time: a few chunks took too long",
            (cell.name,),
        )


def _not_idle(cell: CellEvidence) -> Iterator[Finding]:
    """Speed-ups compare chunks in pairs, which helps; the rates themselves are those of a busy machine."""
    cores = cell.summary.other_cores if cell.summary else None
    if cores is not None and cores.median >= IDLE_CORES:
        yield Finding(
            "remark",
            "rates",
            f"{cell.name} was timed on a machine that was not idle: others kept {cores.median:.1f} cores busy, "
            f"at most {cores.largest:.1f}",
        )


def _speed_up(cell: CellEvidence, baseline: CellEvidence) -> Iterator[Finding]:
    """The rates that are shown agree with the speed-up that is shown beside them.

    A baseline is timed anew in every session in which one of its configs runs. If those of a config agree with the
    speed-up and only all of them together do not, the machine was faster or slower on another day: no fault.
    """
    if cell.summary is None or baseline.summary is None:
        return
    ours, theirs, up = cell.summary.rate, baseline.summary.rate, cell.summary.speed_up.tokens_per_s
    if ours is None or theirs is None or _agree(ours, theirs, up):
        return
    together = {each.key for each in cell.counting}
    paired = [each for each in baseline.counting if each.key in together]
    beside = median_rate(paired)
    said = (
        f"{cell.name} and {baseline.name} have {ours.value:.0f} and {theirs.value:.0f} tokens/s "
        f"beside a speed-up of {up.value:.2f} [{up.low:.2f}, {up.high:.2f}]"
    )
    if len(paired) < len(baseline.counting) and beside is not None and _agree(ours, beside, up):
        yield Finding(
            "remark",
            "rates",
            f"{said}: {baseline.name} has timings of other sessions too; in those of {cell.name} it had "
            f"{beside.value:.0f} tokens/s",
        )
    else:
        yield Finding("invalid", "rates", said)


def _agree(ours: Interval, theirs: Interval, up: Interval) -> bool:
    """Whether a speed-up's interval meets that of the two rates' ratio."""
    return theirs.low <= 0 or (up.low <= ours.high / theirs.low and up.high >= ours.low / theirs.high)
