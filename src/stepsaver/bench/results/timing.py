"""A line of `trace.jsonl`: what running one chunk once took."""

from typing import Any

from stepsaver.bench.results.stored import Number, Stored

StepCounts = list[list[Any]]  # per group of equal steps: how many, their context in all, then its fields
Kinds = dict[str, dict[str, Number]]  # by kind of step, what it cost


class Timing(Stored):
    chunk: int
    session: str
    comparable: bool  # nothing else ran on the machine, as far as the run knows
    when: float
    samples: int
    requests: int
    tokens: int
    seconds: float
    predicted_seconds: float | None = None  # by what rows take on the machine, where that was measured
    prefill_seconds: float = 0.0
    warm_up_seconds: float
    forwards: Number
    denoising_steps: Number
    flops: Number
    row_layers: Number
    row_layers_reused: Number
    by_kind: Kinds
    steps: StepCounts
    sample_forwards: int | None = None  # summed over samples; None: a version did not count them
    planning_seconds: float | None = None
    peak_memory_bytes: int
    loading_seconds: float
    gpu: str | None
    other_cores: float | None = None  # that others kept busy meanwhile; None where the system does not say
    threads: int | None = None
    instead_of: str | None = None  # the session whose timing of this chunk it counts instead of

    @property
    def key(self) -> tuple[int, str]:
        return self.chunk, self.session
