"""`summary.json` and `run.json` as they are read: what has not the kinds of values that they have is something else."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepsaver.engine.prediction import Predicts

Interval = Annotated[list[float], Field(min_length=3, max_length=3)]  # value, low, high


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # other versions wrote more, or less


class _Paired(_Part):
    drop_points: Interval
    lost: int
    won: int
    mcnemar_p: float


class _Throughput(_Part):
    tokens: float
    decode_seconds: float
    tokens_per_s: float | None
    loading_seconds: float = 0.0
    warm_up_seconds: float = 0.0


class _TimedAgain(_Part):
    chunk: int
    seconds: float
    seconds_before: float


class _Cost(_Part):
    forwards: float
    row_layers: float
    row_layers_reused: float
    by_kind: dict[str, dict[str, float]]


class _EvaluationParameters(_Part):
    rules: list[str]
    policy: str
    batch_size: int


class _Decoding(_Part):
    block_size: int
    sub_block_size: int
    mask_id: int
    stop_ids: list[int]
    prefix_cache: bool
    block_cache: bool
    predicts: Predicts = "next"


class _Identity(_Part):
    """What a run is identified by."""

    rules: list[str]
    policy: str
    layers: int
    task: str
    dtype: str
    decoding: _Decoding


class _Provenance(_Part):
    git: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    given: dict[str, Any] | None = None


class _Run(_Part):
    run_id: str
    identity: _Identity
    provenance: _Provenance | None = None


class _Summary(_Provenance):
    task: str
    config: str
    run_id: str
    timestamp: str
    accuracy: float
    accuracy_metric: str
    accuracy_interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    samples: int
    is_baseline: bool
    paired: _Paired
    speed_up: dict[str, Interval]
    steps: list[Annotated[list[int | str | None], Field(min_length=3)]] | None = None
    sample_forwards: int | None = None
    planning_seconds: float | None = None
    speed_up_chunks: int
    chunks: int
    chunks_not_comparable: int
    confirmation_p: float
    predicted_speed_up: float | None
    throughput: _Throughput
    cost: _Cost
    eval_params: _EvaluationParameters
    inert_rules: list[dict[str, str]]
    equal_to: str | None
    batch_invariance: dict[str, int]
    identity: _Identity
    rate: Interval | None = None
    predicted_here: float | None = None
    baseline: str | None = None
    timed_again: list[_TimedAgain] = []
    disturbed_chunks: list[int] = []
    other_cores: dict[str, float] | None = None
    made_of: dict[str, str] = {}
    ceiling: float | None = None
    peak_memory_bytes: int = 0
    beside: dict[str, float] = {}
    groups: dict[str, Any] = {}
    model_args: dict[str, str | None] = {}
    gpu_info: str | None = None
    spot_check: dict[str, Any] | None = None


def is_summary(content: object) -> bool:
    return _holds(_Summary, content)


def is_run(content: object) -> bool:
    return _holds(_Run, content)


def _holds(kind: type[_Part], content: object) -> bool:
    try:
        kind.model_validate(content)
    except ValidationError:
        return False
    return True
