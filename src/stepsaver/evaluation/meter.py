"""Requests, tokens and seconds of a path. Warm-up counts separately: it happens once, for a task of any size."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from stepsaver.engine.trace import Trace
from stepsaver.evaluation.records import InferencePath


@dataclass
class Meter:
    """Adds up what one path's requests took; the seconds are the trace's. Requests with stored answers are not counted.

    `tokens` were generated, including stop tokens, or scored.
    """

    path: InferencePath
    trace: Trace
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    warm_up_seconds: float = 0.0

    def warm_up(self, run: Callable[[Trace], object]) -> None:
        """Runs one batch for a little, once, before timing starts: first forwards allocate, tune and compile."""
        if not self.warm_up_seconds:
            started = perf_counter()
            run(Trace())
            self.warm_up_seconds = perf_counter() - started

    def count(self, *, tokens: int, prompt_tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens
