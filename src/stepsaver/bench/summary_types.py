"""`summary.json` as it is read: what does not have the kinds of values that a summary has is something else."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stepsaver.engine.prediction import Predicts


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # other versions wrote more, or less


class _Paired(_Part):
    drop_points: list[float]
    lost: int
    won: int
    mcnemar_p: float


class _Throughput(_Part):
    tokens: float
    decode_seconds: float
    tokens_per_s: float | None
    loading_seconds: float = 0.0
    warm_up_seconds: float = 0.0


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


class _Summary(_Provenance):
    task: str
    config: str
    run_id: str
    timestamp: str
    accuracy: float
    accuracy_metric: str
    accuracy_interval: list[float]
    samples: int
    is_baseline: bool
    paired: _Paired
    speed_up: dict[str, list[float]]
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
    ceiling: float | None = None
    peak_memory_bytes: int = 0
    beside: dict[str, float] = {}
    groups: dict[str, Any] = {}
    model_args: dict[str, str | None] = {}
    gpu_info: str | None = None
    spot_check: dict[str, Any] | None = None


def is_summary(content: object) -> bool:
    try:
        _Summary.model_validate(content)
    except ValidationError:
        return False
    return True
