"""Prompts without labels: how far an answer agrees with that of plain decoding counts instead of how right it is."""

import re
from collections.abc import Sequence

from stepsaver.engine.errors import UsageError, shown
from stepsaver.evaluation.records import RequestRecord


def answer_pattern(text: str | None) -> re.Pattern[str] | None:
    """Returns the regular expression that finds an answer in a text; its first group, if it has one, is the answer."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"--answer {shown(text)} is no regular expression: {error}") from None


def how_compared(pattern: re.Pattern[str] | None) -> str:
    """Returns, in words, how answers are compared, for every output."""
    return f"same final answer by {pattern.pattern}" if pattern else "same text, else the share of equal tokens"


def agreement(ours: RequestRecord, plain: RequestRecord, pattern: re.Pattern[str] | None) -> float:
    """Returns a number from 0 to 1. With a pattern: 1 if the last answer or the whole text is the same, else 0."""
    if ours.text == plain.text:
        return 1.0
    if pattern is not None:
        found = [_last(pattern, each.text or "") for each in (ours, plain)]
        return float(found[0] is not None and found[0] == found[1])
    return _equal_tokens(ours.ids, plain.ids)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = list(pattern.finditer(text))
    return (found[-1][1] if pattern.groups else found[-1][0]) if found else None


def _equal_tokens(ours: Sequence[int], plain: Sequence[int]) -> float:
    """Returns the share of the longer text's positions that have the same token in both."""
    longer = max(len(ours), len(plain))
    return sum(one == other for one, other in zip(ours, plain, strict=False)) / longer if longer else 1.0
