"""From a request's text to ids that fit the model."""

from typing import NamedTuple

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.tokenizer import TextTokenizer


class EncodedPair(NamedTuple):
    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Fitted(NamedTuple):
    """Ids that fit, and how many were cut from the left."""

    ids: tuple[int, ...]
    cut: int


def encode_pair(tokenizer: TextTokenizer, context: str, continuation: str) -> EncodedPair:
    """The harness's convention: white space between the two belongs to the continuation, and the pair is encoded whole.

    So a word keeps the token it has in running text. The context's own ids then say where the continuation begins.
    """
    whole = tokenizer.encode(context + continuation)
    before = tokenizer.encode(context.rstrip())
    return EncodedPair(tuple(before), tuple(whole[len(before) :]))


def fit_left(ids: tuple[int, ...], *, room: int, behind: int, what: str) -> Fitted:
    """Cuts a prompt from the left so that it and `behind` further tokens fit into `room` positions."""
    most = room - behind
    if most < 1:
        raise UsageError(f"{what}: {behind} tokens leave no place for a prompt in the model's {room} positions")
    return Fitted(ids[-most:], max(len(ids) - most, 0))
