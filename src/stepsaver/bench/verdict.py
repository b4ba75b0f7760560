"""Whether the hypothesis holds, on the intervals and corrected for the number of configs that were tried."""

from dataclasses import dataclass
from math import ceil, isnan
from typing import Any, Literal

from stepsaver.bench.spec import Condition, Success
from stepsaver.bench.statistics import Interval, holm

Outcome = Literal["confirmed", "rejected", "undecided"]
LEAST_CHUNKS = 8


@dataclass(frozen=True)
class ConfigVerdict:
    config: str
    outcome: Outcome
    reason: str
    speed_up: Interval  # the smaller of the two
    drop_points: Interval


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str
    configs: tuple[ConfigVerdict, ...]


def judge(summaries: list[dict[str, Any]], success: Success) -> Verdict:
    """Confirmed if any config is (after Holm's correction), rejected if all are, else undecided."""
    others = [each for each in summaries if not each["is_baseline"]]
    standing = holm({each["config"]: each["confirmation_p"] for each in others})
    judged = [_judge_one(each, success, stands=each["config"] in standing) for each in others]
    if not judged:
        return Verdict("undecided", "Undecided: no config beside the baseline has results.", ())
    confirmed = [each for each in judged if each.outcome == "confirmed"]
    if confirmed:
        best = max(confirmed, key=lambda each: each.speed_up.value)
        return Verdict("confirmed", f"Confirmed by {best.config}: {_figures(best)}.", tuple(judged))
    if all(each.outcome == "rejected" for each in judged):
        best = max(judged, key=lambda each: each.speed_up.value)
        return Verdict(
            "rejected", f"Rejected: no config holds; the fastest is {best.config}, {_figures(best)}.", tuple(judged)
        )
    nearest = next(each for each in judged if each.outcome == "undecided")
    return Verdict("undecided", f"Undecided: {nearest.config}: {nearest.reason} ({_figures(nearest)}).", tuple(judged))


def smaller_speed_up(summary: dict[str, Any]) -> Interval:
    return min((Interval(*each) for each in summary["speed_up"].values()), key=lambda each: each.value)


def _judge_one(summary: dict[str, Any], success: Success, *, stands: bool) -> ConfigVerdict:
    up, drop = smaller_speed_up(summary), Interval(*summary["paired"]["drop_points"])
    outcome, reason = _outcome(up, drop, summary, success)
    if outcome == "confirmed" and not stands:
        outcome, reason = "undecided", "both bounds hold on the intervals, but not after correcting for all configs"
    return ConfigVerdict(summary["config"], outcome, reason, up, drop)


def _outcome(up: Interval, drop: Interval, summary: dict[str, Any], success: Success) -> tuple[Outcome, str]:
    if isnan(up.value):
        return "undecided", "no chunk was timed beside the baseline in one session"
    if summary["speed_up_chunks"] < LEAST_CHUNKS:
        return "undecided", f"only {summary['speed_up_chunks']} of at least {LEAST_CHUNKS} chunks are timed"
    wanted, unwanted = success.confirm_if, success.reject_if
    if _surely(up, wanted.speed_up) and _surely(drop, wanted.drop_points):
        return "confirmed", "both bounds hold on the intervals"
    if _surely(up, unwanted.speed_up):
        return "rejected", f"the speed-up is {unwanted.speed_up} on its interval"
    if _surely(drop, unwanted.drop_points):
        return "rejected", f"the drop is {unwanted.drop_points} points on its interval"
    if _surely_not(up, wanted.speed_up):
        return "rejected", f"the speed-up is not {wanted.speed_up} on its interval"
    if _surely_not(drop, wanted.drop_points):
        return "rejected", f"the drop is not {wanted.drop_points} points on its interval"
    return "undecided", f"about {_samples_needed(up, drop, summary, success)} samples would decide it"


def _surely(interval: Interval, condition: Condition) -> bool:
    return interval.low > condition.bound if condition.sign == ">" else interval.high < condition.bound


def _surely_not(interval: Interval, condition: Condition) -> bool:
    return interval.high <= condition.bound if condition.sign == ">" else interval.low >= condition.bound


def _samples_needed(up: Interval, drop: Interval, summary: dict[str, Any], success: Success) -> int:
    """Intervals shrink with the root of the number of samples: how many until neither holds its bound."""
    factor = 1.0
    for interval, condition in ((up, success.confirm_if.speed_up), (drop, success.confirm_if.drop_points)):
        distance = abs(interval.value - condition.bound)
        width = max(interval.high - interval.value, interval.value - interval.low)
        if width > distance > 0:
            factor = max(factor, (width / distance) ** 2)
    return ceil(factor * summary["samples"])


def _figures(each: ConfigVerdict) -> str:
    return (
        f"{each.speed_up.value:.2f}x [{each.speed_up.low:.2f}, {each.speed_up.high:.2f}] at a drop of "
        f"{each.drop_points.value:.1f} [{each.drop_points.low:.1f}, {each.drop_points.high:.1f}] points"
    )
