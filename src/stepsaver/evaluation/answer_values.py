"""Scores some answers of a task with lm-eval's filters and metrics, without needing all of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance

from stepsaver.evaluation.evaluate import DocumentScore
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.task_loading import LoadedTask


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
