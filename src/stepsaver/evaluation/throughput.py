"""Tokens per second, generated or scored. Loading and warm-up count separately: they happen once, for any task size."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from stepsaver.engine.trace import Trace
from stepsaver.evaluation.records import InferencePath


@dataclass(frozen=True)
class Throughput:
    """`tokens` were generated, including stop tokens, or scored. Requests with stored answers are not counted."""

    path: InferencePath
    requests: int
    tokens: int
    prompt_tokens: int
    decode_seconds: float  # all forwards and choices, prefill included
    loading_seconds: float
    warm_up_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.decode_seconds if self.decode_seconds else None

    @property
    def requests_per_second(self) -> float | None:
        return self.requests / self.decode_seconds if self.decode_seconds else None


def throughput_to_json(throughput: Throughput) -> dict[str, Any]:
    rates = {
        "tokens_per_second": throughput.tokens_per_second,
        "requests_per_second": throughput.requests_per_second,
    }
    return asdict(throughput) | rates


@dataclass
class Meter:
    """Adds up the tokens and seconds of one path's requests."""

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

    def throughput(self, *, loading_seconds: float) -> Throughput:
        return Throughput(
            self.path,
            self.requests,
            self.tokens,
            self.prompt_tokens,
            self.trace.decode_seconds,
            loading_seconds,
            self.warm_up_seconds,
        )
