"""What a run stores, as types: `run.json`, the lines of `trace.jsonl` and `scores.jsonl`, and `summary.json`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from stepsaver.bench.statistics import Interval
from stepsaver.engine.positions import Predicts

Number = int | float
KIND_FIGURES = ("steps", "row_layers", "row_layers_reused", "flops")


class Stored(BaseModel):
    """A stored document, or a part of one: exactly these fields, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, content: object) -> Self | None:
        """Returns None if the content is something else."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


def _interval(value: object) -> Interval:
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(type(each) in (int, float) for each in value):
        raise ValueError("an interval is a value, its lower and its upper bound")
    return Interval(*map(float, value))


def _complete(figures: dict[str, Number]) -> dict[str, Number]:
    missing = [name for name in KIND_FIGURES if name not in figures]
    if missing:
        raise ValueError(f"a kind of step lacks {', '.join(missing)}")
    return figures


StoredInterval = Annotated[Interval, PlainValidator(_interval), PlainSerializer(list)]  # value, low, high
Kinds = dict[str, Annotated[dict[str, Number], AfterValidator(_complete)]]  # by kind of step, what it cost


class DecodingIdentity(Stored):
    block_size: int
    sub_block_size: int
    mask_id: int
    stop_ids: Sequence[int]
    bos_id: int | None
    prefix_cache: bool
    block_cache: bool
    predicts: Predicts
    join: str


class Identity(Stored):
    """Everything that changes a run's numbers."""

    plugins: dict[str, str]  # hashes of rules and policies that are not ours
    model: str  # hash
    layers: int
    source: str  # hash
    libraries: dict[str, str]
    kernels: bool  # whether they were used
    weights: str
    decode: str
    rules: list[str]
    policy: str | None  # of block diffusion
    decoding: DecodingIdentity
    task: str
    metric: str | None
    num_fewshot: int | dict[str, int] | None
    data: str  # hash
    limit: int | None
    seed: int
    estimator: str
    max_new_tokens: int  # where a task sets no limit
    token_limit: int | None  # instead of every task's own
    dtype: str
    device: str
    batch_size: int
    chunk_samples: int

    @property
    def decoder(self) -> str:
        """For people: the policy of block diffusion, or another decoder."""
        return self.policy or self.decode


class Provenance(Stored):
    """Where a run began. Not part of its identity."""

    git: dict[str, Any]
    environment: dict[str, Any]
    machine: dict[str, Any]
    given: dict[str, Any]  # what the command line changed in the experiment's file


class RunDocument(Stored):
    run_id: str
    opened_by: str  # the label of the run whose first process opened it
    provenance: Provenance
    identity: Identity
    sum: str | None = None


class Timing(Stored):
    """A line of `trace.jsonl`: what running one chunk once took."""

    chunk: int
    session: str
    comparable: bool  # nothing else ran on the machine, as far as the run knows
    when: float
    samples: int
    requests: int
    tokens: int
    seconds: float
    predicted_seconds: float | None  # by what forwards were measured to cost; None: not measured
    prefill_seconds: float
    warm_up_seconds: float
    forwards: Number
    denoising_steps: Number
    flops: Number
    row_layers: Number
    row_layers_reused: Number
    by_kind: Kinds
    sample_forwards: int  # summed over samples
    planning_seconds: float
    peak_memory_bytes: int
    loading_seconds: float
    gpu: str | None
    other_cores: float | None  # that other processes kept busy meanwhile; None if the system does not say
    threads: int
    instead_of: str | None = None  # the session whose timing of this chunk it replaces
    repeat: int = 0  # 0: the run that the samples come from; later ones are for the timings alone

    @property
    def key(self) -> tuple[int, str]:
        return self.chunk, self.session

    @property
    def process(self) -> str:
        """Of the session: chunks that it timed again have a number behind it."""
        return self.session.partition(".")[0]


class StoredScore(Stored):
    """A line of `scores.jsonl`: how right the answer to a document is, by the metric that counts."""

    task: str
    document: int
    value: float


class PairedAnswers(Stored):
    """The answers against the baseline's, sample by sample."""

    drop_points: StoredInterval
    test: Literal["score", "t"]  # Tango's of paired shares, or a paired t-test of scores that are not 0 or 1
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
    requests: Number
    decode_seconds: float
    tokens_per_s: float | None
    requests_per_s: float | None
    loading_seconds: float
    warm_up_seconds: float


class CostTotals(Stored):
    forwards: Number
    denoising_steps: Number
    flops: Number
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


class ModelParameters(Stored):
    model: str
    revision: str | None
    dtype: str


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


class Summary(Stored):
    """`summary.json`: the figures of a complete cell."""

    task: str
    config: str
    timestamp: str
    accuracy: float
    accuracy_metric: str
    accuracy_interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    beside: dict[str, float]
    groups: dict[str, float]
    samples: int
    baseline: str
    is_baseline: bool
    is_reference: bool  # autoregressive decoding: shown beside the others, and never judged
    is_control: bool  # it does the baseline's work and nothing else, as with k = 1: what its timings say is noise
    unlike_baseline: list[str]  # the parts of its identity in which it differs from the baseline
    different_answers: int  # requests that the baseline answered otherwise
    paired: PairedAnswers
    speed_up: SpeedUp
    over_reference: SpeedUp | None  # over autoregressive decoding, if that was timed beside it
    pairs: int  # of a chunk and a session in which it was timed beside the baseline
    rate: StoredInterval | None  # tokens/s of the chunks that count for the speed-up
    timed_again: list[TimedAgain]
    chunks: int
    chunks_not_comparable: int
    sessions: int  # that timed these pairs
    confirmation_p: float
    predicted: float | None  # the speed-up in tokens/s
    predicted_by: Literal["curve", "operations"]  # what forwards were measured to cost, or operations executed
    throughput: Throughput
    tokens_before_stop: int | None  # None: nothing was generated
    cost: CostTotals
    sample_forwards: int
    planning_seconds: float
    peak_memory_bytes: int
    gpu_info: str | None
    git: dict[str, Any]
    environment: dict[str, Any]
    machine: dict[str, Any]
    model_args: ModelParameters
    eval_params: dict[str, Any]  # the settings that the run really had, besides its model
    run_id: str
    identity: Identity
    other_cores: OtherCores | None
    disturbed_chunks: list[int]
    inert_rules: list[Inert]
    equal_to: str | None  # the config whose answers it took over
    spot_check: SpotCheck | None
    batch_invariance: BatchInvariance
    made_of: dict[str, str] = Field(default_factory=dict)  # by file, the checksum of what was its last line
    rates: list[list[Number]] | None = None  # of an artifact: by chunk, minutes since the first and tokens/s
    sum: str | None = None
