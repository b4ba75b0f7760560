"""Evaluates a loaded task with lm-eval's own evaluator: requests, answers, filters, metrics.

Its request cache is never used: its key is the prompt alone, so two configs would share their answers.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.utils import env as templates

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.adapter import StepsaverLM
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.task_loading import LoadedTask

_compiled = lru_cache(maxsize=256)(templates.from_string)
RANDOM_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234  # lm-eval's own; some tasks use the global generators


@dataclass(frozen=True)
class EvaluationOptions:
    limit: int | None = None  # the number of documents of each task, counted from the first
    apply_chat_template: bool | None = None  # None: yes if the tokenizer has one
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None


@dataclass(frozen=True)
class DocumentScore:
    task: str
    document: int
    value: float


@dataclass(frozen=True)
class TaskResult:
    """`accuracy` is the task's declared metric; `documents` has the score of each document."""

    task: str
    metric: str
    accuracy: float
    beside: dict[str, float]
    documents: tuple[DocumentScore, ...]
    harness: dict[str, Any] = field(repr=False)  # lm-eval's own results, without the samples

    def members(self) -> dict[str, float]:
        """The accuracy of every group and task below a group, by lm-eval's names; empty for a single task."""
        found = {**self.harness["results"], **self.harness.get("groups", {})}
        return {
            name: float(figures[self.metric])
            for name, figures in sorted(found.items())
            if name != self.task and self.metric in figures
        }


class ScoringFailed(RuntimeError):
    """The model answered everything, but a scorer failed. The answers are stored and can be scored again."""


@contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """The harness compiles its templates anew for every document, which takes most of the time that scoring takes."""
    templates.from_string = _compiled
    try:
        yield
    finally:
        vars(templates).pop("from_string", None)  # the method of the class serves again


def build_requests(
    lm: StepsaverLM, task: LoadedTask, options: EvaluationOptions | None = None
) -> dict[str, list[Instance]]:
    """The requests that an evaluation will make, by task. Nothing is run."""
    options = options or EvaluationOptions()
    uses_chat = _uses_chat(lm, options)
    _seed(task)
    try:
        with _templates_compiled_once():
            for member in task.harness["tasks"].values():
                member.build_all_requests(
                    limit=options.limit,
                    system_instruction=options.system_instruction,
                    apply_chat_template=uses_chat,
                    fewshot_as_multiturn=options.fewshot_as_multiturn and uses_chat,
                    chat_template=lm.apply_chat_template if uses_chat else None,
                    tokenizer_name=lm.tokenizer_name,
                )
    except UsageError:
        raise
    except Exception as error:  # a task's own Python and templates, on documents by anybody
        raise UsageError(f"task {task.name}: its documents make no requests: {type(error).__name__}: {error}") from None
    return {name: list(member.instances) for name, member in task.harness["tasks"].items()}


def evaluate_task(lm: StepsaverLM, task: LoadedTask, options: EvaluationOptions | None = None) -> TaskResult:
    options = options or EvaluationOptions()
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"limit {options.limit} is not positive")
    uses_chat = _uses_chat(lm, options)
    _seed(task)
    lm.is_complete = False
    try:
        with _templates_compiled_once():
            results = evaluate(
                lm,
                task.harness,
                limit=options.limit,
                bootstrap_iters=0,  # the bench computes its own intervals
                system_instruction=options.system_instruction,
                apply_chat_template=uses_chat,
                fewshot_as_multiturn=options.fewshot_as_multiturn and uses_chat,
                confirm_run_unsafe_code=task.runs_unsafe_code,  # `load_task` asked for the confirmation
            )
    except Exception as error:
        if isinstance(error, UsageError) or not lm.is_complete:
            raise
        raise ScoringFailed(f"{task.name}: scoring failed after all answers were there: {error!r}") from error
    assert results is not None
    samples = results.pop("samples")
    return TaskResult(
        task.name,
        task.accuracy,
        accuracy=_metric(results, task.name, task.accuracy),
        beside={key: _metric(results, task.name, key) for key in task.beside},
        documents=tuple(_document_scores(samples, task.accuracy)),
        harness=results,
    )


def _uses_chat(lm: StepsaverLM, options: EvaluationOptions) -> bool:
    return lm.text_tokenizer.has_chat_template if options.apply_chat_template is None else options.apply_chat_template


def _seed(task: LoadedTask) -> None:
    """Seeds before every pass over a task: each pass draws few-shot examples, and every config must draw the same."""
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    for member in task.harness["tasks"].values():
        member.set_fewshot_seed(seed=FEWSHOT_SEED)


def _metric(results: dict[str, Any], name: str, key: str) -> float:
    """The figure of a task, or of a group, which lm-eval averages by the members' sizes."""
    found = results["results"].get(name, {}).get(key)
    if found is None:
        found = results.get("groups", {}).get(name, {}).get(key)
    assert found is not None, f"lm-eval's results have no {key} for {name}"
    return float(found)


def _document_scores(samples: dict[str, list[dict[str, Any]]], key: str) -> list[DocumentScore]:
    metric, _, filter_name = key.rpartition(",")
    return [
        DocumentScore(task, sample["doc_id"], float(sample[metric]))
        for task, members in samples.items()
        for sample in members
        if sample["filter"] == filter_name
    ]


def answer_values(
    task: LoadedTask, requests: Sequence[Instance], records: Sequence[RequestRecord]
) -> list[DocumentScore]:
    """The value, from 0 to 1, of every document whose requests are given, by the task's accuracy metric."""
    metric, _, filter_name = task.accuracy.rpartition(",")
    answers: dict[tuple[str, int, int], list[Any]] = defaultdict(list)
    for record in records:
        given = record.text if record.path == "generation" else (record.loglikelihood, bool(record.is_greedy))
        answers[record.key.task, record.key.document, record.key.request].append(given)
    by_document: dict[tuple[str, int], list[Instance]] = defaultdict(list)
    for request in requests:  # copies, so that the task's own requests stay without answers
        responses = answers[request.task_name, request.doc_id, request.idx]
        assert responses, f"{request.task_name} document {request.doc_id} has no answer"
        answered = replace(request, resps=responses, filtered_resps={})
        by_document[request.task_name, request.doc_id].append(answered)
    for name, member in task.harness["tasks"].items():
        chosen = [each for (owner, _), found in by_document.items() if owner == name for each in found]
        for ensemble in member._filters if chosen else ():
            if ensemble.name == filter_name:
                ensemble.apply(chosen)
    values = []
    for (name, document), found in by_document.items():
        ordered = sorted(found, key=lambda each: each.idx)
        results = [each.filtered_resps[filter_name] for each in ordered]
        marks = task.harness["tasks"][name].process_results(ordered[0].doc, results)
        values.append(DocumentScore(name, document, float(marks[metric])))
    return values
