"""The kinds of values that the public functions take. Anything else is refused in one line, before it fails deeper."""

from collections.abc import Callable
from numbers import Integral, Real
from typing import NamedTuple

from stepsaver.engine.errors import UsageError, shown


class Kind(NamedTuple):
    says: str
    has: Callable[[object], bool]


def _is_float(value: Real) -> bool:
    """False for an integer that is too large for a float. Infinity and NaN are refused where they are used."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


WHOLE = Kind("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool))
NUMBER = Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool) and _is_float(value))
TRUTH = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
# Arguments that are not listed here are checked where they are used.
KINDS = {
    **dict.fromkeys(("batch_size", "max_new_tokens", "seed", "block_size", "sub_block_size", "mask_id"), WHOLE),
    **dict.fromkeys(("threshold", "temperature", "top_p"), NUMBER),
    **dict.fromkeys(("chat", "ids", "stream", "score_stop", "prefix_cache", "block_cache"), TRUTH),
    **dict.fromkeys(("text", "revision", "device", "dtype", "weights", "join", "estimator"), TEXT),
}
MAY_BE_NONE = ("batch_size", "block_size", "sub_block_size", "mask_id", "threshold", "revision")


def check_arguments(**given: object) -> None:
    """Raises for the first argument that is not of its kind. Ranges are checked where they are known."""
    for name, value in given.items():
        kind = KINDS[name]
        if not kind.has(value) and not (value is None and name in MAY_BE_NONE):
            raise UsageError(f"{name} {shown(value)} is not {kind.says}")
