"""A line of `trace.jsonl`: what running one chunk once took."""

from typing import Annotated, Any

from pydantic import AfterValidator

from stepsaver.bench.results.stored import Number, Stored

StepCounts = list[list[Any]]  # per group of equal steps: how many, the sum of their contexts, then their fields
KIND_FIGURES = ("steps", "row_layers", "row_layers_reused", "flops")


def _complete(figures: dict[str, Number]) -> dict[str, Number]:
    missing = [name for name in KIND_FIGURES if name not in figures]
    if missing:
        raise ValueError(f"a kind of step lacks {', '.join(missing)}")
    return figures


Kinds = dict[str, Annotated[dict[str, Number], AfterValidator(_complete)]]  # by kind of step, what it cost


class Timing(Stored):
    chunk: int
    session: str
    comparable: bool  # nothing else ran on the machine, as far as the run knows
    when: float
    samples: int
    requests: int
    tokens: int
    seconds: float
    predicted_seconds: float | None = None  # by the machine's row costs, if they were measured
    prefill_seconds: float = 0.0
    warm_up_seconds: float
    forwards: Number
    denoising_steps: Number
    flops: Number
    row_layers: Number
    row_layers_reused: Number
    by_kind: Kinds
    steps: StepCounts
    sample_forwards: int | None = None  # summed over samples; None: an older version did not count them
    planning_seconds: float | None = None
    peak_memory_bytes: int
    loading_seconds: float
    gpu: str | None
    other_cores: float | None = None  # that other processes kept busy meanwhile; None if the system does not say
    threads: int | None = None
    instead_of: str | None = None  # the session whose timing of this chunk it replaces

    @property
    def key(self) -> tuple[int, str]:
        return self.chunk, self.session
