"""Typed documents: what a run stores is written and read by the same classes."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from stepsaver.bench.statistics import Interval
from stepsaver.engine.defaults import DECODE
from stepsaver.engine.prediction import Predicts

Number = int | float


class Stored(BaseModel):
    """A stored document, or a part of one. Other versions wrote more or less: unknown fields are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @classmethod
    def read(cls, content: object) -> Self | None:
        """Returns None if the content does not have the types that it should have: then it is something else."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None

    def as_json(self) -> dict[str, Any]:
        """Returns what was read, or all that it was made with: no default is added that a version did not write."""
        return self.model_dump(exclude_unset=True)


def _interval(value: object) -> Interval:
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(type(each) in (int, float) for each in value):
        raise ValueError("an interval is a value, its lower and its upper bound")
    return Interval(*map(float, value))


StoredInterval = Annotated[Interval, PlainValidator(_interval), PlainSerializer(list)]  # value, low, high


class DecodingIdentity(Stored):
    block_size: int
    sub_block_size: int
    mask_id: int
    stop_ids: Sequence[int]
    bos_id: int | None = None
    prefix_cache: bool
    block_cache: bool
    predicts: Predicts = "next"  # runs from before there were others do not say
    join: str = "off"


class Identity(Stored):
    """Everything that changes a run's numbers. Fields with a default were not written by every version."""

    plugins: dict[str, str] | None = None  # hashes of rules and policies that are not ours, where there are any
    model: str | None = None  # hash
    layers: int
    source: str | None = None  # hash
    libraries: dict[str, str] | None = None
    kernels: bool | None = None  # whether they were used
    weights: str | None = None
    decode: str = DECODE
    rules: list[str]
    policy: str | None = None  # of block diffusion
    decoding: DecodingIdentity
    task: str
    metric: str | None = None
    num_fewshot: int | dict[str, int] | None = None
    data: str | None = None  # hash
    limit: int | None = None
    seed: int | None = None
    estimator: str | None = None
    max_new_tokens: int | None = None  # where a task sets no limit
    token_limit: int | None = None  # instead of every task's own
    dtype: str
    device: str | None = None
    batch_size: int | None = None
    chunk_samples: int | None = None

    @property
    def decoder(self) -> str:
        """For people: the policy of block diffusion, or another decoder."""
        return self.policy or self.decode


class Provenance(Stored):
    """Where a run began. Not part of its identity."""

    git: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    given: dict[str, Any] | None = None  # what the command line changed in the experiment's file


class RunDocument(Stored):
    run_id: str
    opened_by: str | None = None  # the label of the run whose first process opened it
    provenance: Provenance | None = None
    identity: Identity
    sum: str | None = None  # None: in the former format


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

    decode: str = DECODE
    rules: list[str]
    policy: str | None = None  # of block diffusion
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
