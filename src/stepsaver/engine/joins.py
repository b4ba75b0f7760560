"""Which forwards are run as one. Imports only `typing`, for `--help`."""

from typing import Literal, NamedTuple, get_args

Join = Literal["auto", "none", "prefill", "commit", "all"]
JOINS: tuple[Join, ...] = get_args(Join)

GUESSED_RIGHT = 0.8  # share of block openings guessed right, a careful figure: the embedded model had 301 of 310


class Joins(NamedTuple):
    prefill: bool  # a prefill and the first step of the first block run in one forward
    commits: bool  # a commit and the first step of the next block, whose first token is guessed, run in one forward


def resolve_joins(join: Join, *, forward_rows: float | None, batch_size: int, block_size: int) -> Joins:
    """`auto`: a prefill is always joined, which costs nothing. A commit is joined if the forward it saves is worth more
    rows than the step that a wrong guess repeats. That depends on `forward_rows`: this machine's cost of a forward on
    top of its rows, shared by the batch. If nobody has measured it, commits are not joined.
    """
    if join != "auto":
        return Joins(join in ("prefill", "all"), join in ("commit", "all"))
    saved = 0.0 if forward_rows is None else GUESSED_RIGHT * forward_rows / batch_size
    return Joins(True, saved > (1 - GUESSED_RIGHT) * block_size)
