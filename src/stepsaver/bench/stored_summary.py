"""`summary.json` as it is read: what does not have the kinds of values that a summary has is not one."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stepsaver.bench.store import read_json


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


class _Cost(_Part):
    forwards: float
    row_layers: float
    row_layers_reused: float
    by_kind: dict[str, dict[str, float]]


class _EvaluationParameters(_Part):
    rules: list[str]
    policy: str
    batch_size: int


class _Summary(_Part):
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


def read_summary(path: Path) -> dict[str, Any] | None:
    """None if there is none, or something else."""
    content = read_json(path)
    return content if content is not None and is_summary(content) else None


def is_summary(content: dict[str, Any]) -> bool:
    try:
        _Summary.model_validate(content)
    except ValidationError:
        return False
    return True
