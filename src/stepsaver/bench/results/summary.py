"""`summary.json`: the figures of a complete cell."""

from typing import Annotated

from pydantic import Field

from stepsaver.bench.judging.statistics import Interval
from stepsaver.bench.results.run_document import Identity, Provenance
from stepsaver.bench.results.stored import Number, Stored, StoredInterval
from stepsaver.bench.results.timing import Kinds


class Paired(Stored):
    """The answers against the baseline's, sample by sample."""

    drop_points: StoredInterval
    lost: int
    won: int
    mcnemar_p: float


class SpeedUp(Stored):
    tokens_per_s: StoredInterval
    seconds_per_sample: StoredInterval

    @property
    def smaller(self) -> Interval:
        """The smaller of the two: garbage raises the first, short answers the second."""
        return min(self.tokens_per_s, self.seconds_per_sample, key=lambda each: each.value)


class Throughput(Stored):
    tokens: Number
    requests: Number = 0
    decode_seconds: float
    tokens_per_s: float | None
    requests_per_s: float | None = None
    loading_seconds: float = 0.0
    warm_up_seconds: float = 0.0


class CostTotals(Stored):
    forwards: Number
    denoising_steps: Number = 0
    flops: Number = 0
    row_layers: Number
    row_layers_reused: Number
    by_kind: Kinds


class TimedAgain(Stored):
    """A chunk whose first timing was disturbed: the seconds that count, and those that stay on record."""

    chunk: int
    seconds: float
    seconds_before: float


class OtherCores(Stored):
    """How many cores other processes kept busy while the chunks ran."""

    median: float
    largest: float


class RunParameters(Stored):
    """The settings that a run really had, besides its model."""

    rules: list[str]
    policy: str
    batch_size: int


class ModelParameters(Stored):
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None


class Inert(Stored):
    """A rule that cannot act on the task."""

    rule: str
    reason: str


class SpotCheck(Stored):
    """Some requests of a config that takes over another one's answers, computed under its own rules as a check."""

    requests: int
    different: list[str]
    row_layers: Number


class BatchInvariance(Stored):
    """Samples that were decoded again, each alone, and how many of them came out differently."""

    samples: int
    different: int


class Summary(Provenance):
    task: str
    config: str
    timestamp: str
    accuracy: float
    accuracy_metric: str
    accuracy_interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    beside: dict[str, float] = Field(default_factory=dict)
    groups: dict[str, float] = Field(default_factory=dict)
    samples: int
    baseline: str | None = None  # None: from an earlier version, whose experiments had a single one
    is_baseline: bool
    unlike_baseline: list[str] | None = None  # the parts of its identity in which it differs from the baseline
    different_answers: int | None = None  # requests that the baseline answered otherwise
    paired: Paired
    speed_up: SpeedUp
    speed_up_chunks: int
    rate: StoredInterval | None = None  # tokens/s of the chunks that count for the speed-up
    timed_again: list[TimedAgain] = Field(default_factory=list)
    chunks: int
    chunks_not_comparable: int
    sessions: int = 0
    confirmation_p: float
    predicted_speed_up: float | None  # by operations
    predicted_here: float | None = None  # by the machine's row costs
    ceiling: float | None = None
    throughput: Throughput
    tokens_before_stop: int | None = None  # None: nothing was generated, or an older version did not count
    cost: CostTotals
    steps: list[Annotated[list[int | str | None], Field(min_length=3)]] | None = None  # as in a timing, merged
    sample_forwards: int | None = None
    planning_seconds: float | None = None
    peak_memory_bytes: int = 0
    gpu_info: str | None = None
    model_args: ModelParameters = ModelParameters()
    eval_params: RunParameters
    run_id: str
    identity: Identity
    other_cores: OtherCores | None = None
    disturbed_chunks: list[int] = Field(default_factory=list)
    inert_rules: list[Inert]
    equal_to: str | None  # the config whose answers it took over
    spot_check: SpotCheck | None = None
    batch_invariance: BatchInvariance
    made_of: dict[str, str] = Field(default_factory=dict)  # by file, the checksum of what was its last line
