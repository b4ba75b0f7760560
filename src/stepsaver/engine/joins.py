"""Which forwards are run as one. Imports nothing, for `--help`."""

from typing import Literal, NamedTuple, get_args

Join = Literal["auto", "none", "prefill", "commit", "all"]
JOINS: tuple[Join, ...] = get_args(Join)

GUESSED_RIGHT = 0.8  # of the tokens that open a block: a careful share, the embedded model guessed 301 of 310


class Joins(NamedTuple):
    prefill: bool  # a prefill and the first step of the first block run in one forward
    commits: bool  # and so do a commit and the first step of the next block, whose first token is guessed


def resolve_joins(join: Join, *, forward_rows: float | None, batch_size: int, block_size: int) -> Joins:
    """`auto`: a prefill is always joined, which costs nothing. A commit is joined where a forward that is saved is
    worth more than the step that a wrong guess repeats, in rows, as this machine's costs say (`forward_rows`, what a
    forward costs beside its rows, shared by the batch); where nobody has measured them, it is not.
    """
    if join != "auto":
        return Joins(join in ("prefill", "all"), join in ("commit", "all"))
    saved = 0.0 if forward_rows is None else GUESSED_RIGHT * forward_rows / batch_size
    return Joins(True, saved > (1 - GUESSED_RIGHT) * block_size)
