"""The samples of a task in chunks: what is run, timed and stored together."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval.api.instance import Instance

from stepsaver.evaluation.adapter import StepsaverLM
from stepsaver.evaluation.evaluate import EvaluationOptions, build_requests
from stepsaver.evaluation.task_loading import LoadedTask


@dataclass(frozen=True)
class SampleKey:
    """A document of a task, or of one of the tasks of a group."""

    task: str
    document: int


@dataclass(frozen=True)
class Chunk:
    """A fixed set of samples. It depends on the task and the chunk size alone, never on who runs it."""

    number: int
    samples: tuple[SampleKey, ...]
    requests: tuple[Instance, ...]


def make_chunks(lm: StepsaverLM, task: LoadedTask, options: EvaluationOptions, size: int) -> list[Chunk]:
    """Returns the samples of a task in the harness's order, `size` in a chunk."""
    by_sample: dict[SampleKey, list[Instance]] = {}
    for name, requests in build_requests(lm, task, options).items():
        for request in requests:
            by_sample.setdefault(SampleKey(name, request.doc_id), []).append(request)
    keys = list(by_sample)
    chunks = []
    for number, start in enumerate(range(0, len(keys), size)):
        members = tuple(keys[start : start + size])
        chunks.append(Chunk(number, members, tuple(request for key in members for request in by_sample[key])))
    return chunks


def data_hash(chunks: Sequence[Chunk]) -> str:
    """Returns the hash of everything that a task asks, and of the documents that its answers are compared with."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for request in chunk.requests:
            content = [request.task_name, request.doc_id, request.arguments, request.doc]
            digest.update(json.dumps(content, sort_keys=True, default=lambda each: type(each).__name__).encode())
    return digest.hexdigest()[:16]
