"""The full result of one request. It is stored before anything is scored, and can answer the request again later."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from stepsaver.engine.errors import UsageError
from stepsaver.engine.trace import DENOISING, SampleStep

InferencePath = Literal["generation", "scoring"]


class RequestKey(NamedTuple):
    """Which request of which document. `repeat` counts the copies, if a task asks for several."""

    task: str
    document: int
    request: int
    repeat: int

    def __str__(self) -> str:
        return f"{self.task} document {self.document} request {self.request} repeat {self.repeat}"


@dataclass(frozen=True)
class RequestRecord:
    """`ids` are the generated tokens including the stop token, or the continuation that was scored."""

    key: RequestKey
    path: InferencePath
    digest: str  # of everything that the answer depends on, except the engine
    prompt_tokens: int
    tokens_cut: int  # from the left of a prompt that was too long
    ids: tuple[int, ...]
    text: str | None = None
    loglikelihood: float | None = None
    is_greedy: bool | None = None
    finish: str | None = None
    denoising_steps: int = 0
    steps: tuple[SampleStep, ...] = ()  # for the trace; not part of the stored line

    @property
    def tokens(self) -> int:
        return len(self.ids)


def request_digest(arguments: tuple[Any, ...]) -> str:
    """Identifies a request by its content: prompt and keywords, or context and continuation, and the settings."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True, default=str).encode()).hexdigest()[:16]


def count_denoising_steps(steps: tuple[SampleStep, ...]) -> int:
    return sum(step.kind in DENOISING for step in steps)


def record_to_json(record: RequestRecord) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(record).items() if name not in ("key", "steps")}
    return {**record.key._asdict(), **fields, "ids": list(record.ids), "tokens": record.tokens}


def record_from_json(line: Mapping[str, Any]) -> RequestRecord:
    fields = dict(line)
    fields.pop("tokens", None)
    try:
        key = RequestKey(*(fields.pop(name) for name in RequestKey._fields))
        return RequestRecord(key=key, ids=tuple(fields.pop("ids")), **fields)
    except (KeyError, TypeError) as error:
        raise UsageError(f"not a stored request: {error}") from None


def require_same_request(record: RequestRecord, digest: str) -> None:
    """Refuses a stored answer to another prompt, which would be scored as if it answered this one."""
    if record.digest != digest:
        raise UsageError(f"the stored answer to {record.key} belongs to another prompt or other generation keywords")
