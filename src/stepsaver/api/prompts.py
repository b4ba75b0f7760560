"""What the public functions take as prompts: texts, conversations and token ids, one or many."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from stepsaver.engine.errors import UsageError, shown

Ids = Sequence[int]  # or an array or tensor of whole numbers
Messages = Sequence[Mapping[str, str]]  # a conversation: each message has a `role` and a `content`
Text = str | Ids | Messages


def listed_prompts(given: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it is one prompt that is answered alone."""
    if isinstance(given, str):
        return [given], True
    listed = listed_items(given, "prompts")
    is_one = bool(listed) and (is_conversation(listed) or all(map(_is_whole, listed)))
    return ([listed], True) if is_one else (listed, False)


def listed_items(given: Any, name: str) -> list[Any]:
    given = _listed_array(given)
    try:
        if not isinstance(given, str | bytes | Mapping) and isinstance(given, Iterable):
            return list(given)
    except TypeError:  # an array without dimensions says that it can be iterated over
        pass
    raise UsageError(f"{name}: {shown(given)} is not a list")


def is_conversation(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(each, Mapping) for each in given)


def token_ids(given: Any, where: str) -> tuple[int, ...]:
    """Token ids from a list, an array or a tensor of whole numbers."""
    listed = _listed_array(given)
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str | bytes)
    if not is_list or not all(map(_is_whole, listed)):
        raise UsageError(f"{where}: {shown(given)} is neither a text nor a list of token ids")
    return tuple(map(int, listed))


def known_ids(given: Any, vocabulary: int) -> tuple[int, ...]:
    ids = token_ids(given, "ids")
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise UsageError(f"id {shown(outside)} is outside the vocabulary of {vocabulary}")
    return ids


def stop_strings(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else listed_items(given, "stop")
    for each in listed:
        if not isinstance(each, str) or not each:
            raise UsageError(f"stop: {shown(each)} is not a text of at least one character")
    return tuple(listed)


def _is_whole(value: Any) -> bool:
    if hasattr(type(value), "ndim") and value.ndim == 0:
        value = value.item()
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _listed_array(given: Any) -> Any:
    """An array or tensor as a list."""
    return given.tolist() if hasattr(type(given), "ndim") and hasattr(type(given), "tolist") and given.ndim else given
