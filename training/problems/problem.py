"""One problem of any embedded task, and how training and test problems are kept apart."""

import hashlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Split = Literal["train", "test"]
TEST_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """What the model is asked, one right answer, and the problem's line in a test file.

    Two problems with the same `identity` are the same, even if worded differently. The identity alone decides the
    split, so a reworded test problem is a test problem too.
    """

    task: str
    identity: str
    prompt: str
    answer: str
    document: dict[str, Any]

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(f"{self.task}:{self.identity}".encode()).digest()
        return "test" if int.from_bytes(digest[:8]) < TEST_SHARE * 2**64 else "train"


Maker = Callable[[Random], Problem]


def problems(make: Maker, *, seed: int, split: Split) -> Iterator[Problem]:
    """An endless seeded stream of one split. A problem's identity decides its split, so the splits are disjoint."""
    random = Random(f"{split}:{seed}")
    while True:
        problem = make(random)
        if problem.split == split:
            yield problem


def distinct_problems(make: Maker, *, seed: int, split: Split, count: int, taken: Container[str] = ()) -> list[Problem]:
    """The first `count` problems of a stream with different prompts and with identities that are not in `taken`."""
    found: dict[str, Problem] = {}
    for problem in problems(make, seed=seed, split=split):
        if problem.identity not in taken:
            found.setdefault(problem.prompt, problem)
        if len(found) == count:
            return list(found.values())
    raise AssertionError("the stream is endless")
