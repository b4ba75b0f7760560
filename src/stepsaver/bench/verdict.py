"""Whether the hypothesis holds: judged by the intervals, and corrected for the number of configs that were tried."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isnan
from typing import Literal

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Condition, Success
from stepsaver.bench.statistics import Interval, holm

Outcome = Literal["confirmed", "rejected", "undecided"]
Control = Literal["control"]  # does exactly the baseline's work: nothing to confirm or to reject
LEAST_PAIRS = 8  # of a chunk and a session


@dataclass(frozen=True)
class ConfigVerdict:
    config: str
    outcome: Outcome | Control
    reason: str
    speed_up: Interval  # the smaller one, by tokens/s or by seconds per sample
    drop_points: Interval
    baseline: str
    over_reference: Interval | None  # likewise, over autoregressive decoding


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str
    configs: tuple[ConfigVerdict, ...]


def judge(summaries: list[Summary], success_of: Callable[[str], Success]) -> Verdict:
    """Confirmed against a baseline if any config is (after Holm's correction), rejected if all are, else undecided.

    Controls and the reference do not count. With several baselines the hypothesis has to hold against each of them.
    """
    others = [each for each in summaries if not each.is_baseline and not each.is_reference]
    standing = holm({each.config: each.confirmation_p for each in others if not each.is_control})
    judged = [_judge_one(each, success_of(each.config), stands=each.config in standing) for each in others]
    if not judged:
        return Verdict("undecided", "Undecided: no config beside the baseline has results.", ())
    baselines = dict.fromkeys(each.baseline for each in judged)
    found = {name: _judge_against([each for each in judged if each.baseline == name]) for name in baselines}
    if len(found) == 1:
        return next(iter(found.values()))
    outcomes = {each.outcome for each in found.values()}
    outcome: Outcome = "rejected" if "rejected" in outcomes else "undecided" if "undecided" in outcomes else "confirmed"
    sentence = " ".join(f"Against {name}: {each.sentence}" for name, each in found.items())
    return Verdict(outcome, f"{outcome.capitalize()}. {sentence}", tuple(judged))


def _judge_against(judged: list[ConfigVerdict]) -> Verdict:
    """Returns the verdict over all configs that are compared with one baseline."""
    everything, tried = tuple(judged), [each for each in judged if each.outcome != "control"]
    if not tried:
        return Verdict(
            "undecided", "Undecided: no config beside the baseline and its controls has results.", everything
        )
    confirmed = [each for each in tried if each.outcome == "confirmed"]
    if confirmed:
        best = max(confirmed, key=lambda each: each.speed_up.value)
        return Verdict("confirmed", f"Confirmed by {best.config}: {figures(best)}.", everything)
    if all(each.outcome == "rejected" for each in tried):
        best = max(tried, key=lambda each: each.speed_up.value)
        return Verdict(
            "rejected", f"Rejected: no config holds; the fastest is {best.config}, {figures(best)}.", everything
        )
    nearest = next(each for each in tried if each.outcome == "undecided")
    return Verdict("undecided", f"Undecided: {nearest.config}: {nearest.reason} ({figures(nearest)}).", everything)


def _judge_one(summary: Summary, success: Success, *, stands: bool) -> ConfigVerdict:
    up, drop = summary.speed_up.smaller, summary.paired.drop_points
    outcome, reason = _outcome(up, drop, summary, success)
    if outcome == "confirmed" and not stands:
        outcome, reason = "undecided", "both bounds hold on the intervals, but not after correcting for all configs"
    over = summary.over_reference.smaller if summary.over_reference else None
    return ConfigVerdict(summary.config, outcome, reason, up, drop, summary.baseline, over)


def _outcome(up: Interval, drop: Interval, summary: Summary, success: Success) -> tuple[Outcome | Control, str]:
    if summary.is_control:
        return "control", "it does exactly the baseline's work"
    if isnan(up.value):
        return "undecided", _why_no_speed_up(summary)
    if summary.pairs < LEAST_PAIRS:
        return "undecided", _too_few_pairs(summary)
    wanted, unwanted = success.confirm_if, success.reject_if
    if surely(up, wanted.speed_up) and surely(drop, wanted.drop_points):
        return "confirmed", "both bounds hold on the intervals"
    if surely(up, unwanted.speed_up):
        return "rejected", f"the speed-up is {unwanted.speed_up} on its interval"
    if surely(drop, unwanted.drop_points):
        return "rejected", f"the drop is {unwanted.drop_points} points on its interval"
    if _surely_not(up, wanted.speed_up):
        return "rejected", f"the speed-up is not {wanted.speed_up} on its interval"
    if _surely_not(drop, wanted.drop_points):
        return "rejected", f"the drop is not {wanted.drop_points} points on its interval"
    return "undecided", _what_would_decide(up, drop, summary, success)


def _why_no_speed_up(summary: Summary) -> str:
    if summary.chunks_not_comparable:
        return "its chunks were timed by shards that shared a machine, which gives no speed-up"
    return "no chunk was timed beside the baseline in one session"


def _too_few_pairs(summary: Summary) -> str:
    """Says how often it would have to be timed, since the task has no more chunks."""
    timed = f"{summary.pairs} pair{'s' * (summary.pairs > 1)} of a chunk and a session"
    return f"timed on {timed}; {LEAST_PAIRS} decide, which takes `run --repeats {ceil(LEAST_PAIRS / summary.chunks)}`"


def surely(interval: Interval, condition: Condition) -> bool:
    """Whether the whole interval meets a bound."""
    return interval.low > condition.bound if condition.sign == ">" else interval.high < condition.bound


def _surely_not(interval: Interval, condition: Condition) -> bool:
    return interval.high <= condition.bound if condition.sign == ">" else interval.low >= condition.bound


def _what_would_decide(up: Interval, drop: Interval, summary: Summary, success: Success) -> str:
    """Says how many more samples would decide, until neither interval contains its bound: intervals shrink with the
    root of the number of samples.
    """
    factor = 1.0
    for interval, condition in ((up, success.confirm_if.speed_up), (drop, success.confirm_if.drop_points)):
        if isnan(interval.low):
            return "too little was timed for an interval"
        distance = abs(interval.value - condition.bound)
        width = max(interval.high - interval.value, interval.value - interval.low)
        if distance == 0:
            return f"a value lies on its bound {condition}, where no number of samples decides"
        factor = max(factor, (width / distance) ** 2)
    return f"about {ceil((factor - 1) * summary.samples)} more samples would decide it"


def times(up: Interval) -> str:
    return f"{up.value:.2f}x" + (f" [{up.low:.2f}, {up.high:.2f}]" if not isnan(up.low) else "")


def figures(each: ConfigVerdict) -> str:
    """Returns speed-up and drop with their intervals, in words."""
    up, drop, over = each.speed_up, each.drop_points, each.over_reference
    speed = "no speed-up" if isnan(up.value) else times(up)
    also = "" if over is None or isnan(over.value) else f", {times(over)} of autoregressive decoding,"
    return f"{speed}{also} at a drop of {drop.value:.1f} [{drop.low:.1f}, {drop.high:.1f}] points"
