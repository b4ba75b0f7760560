"""The samples of a task for the page: questions once, equal answers once, no more than fit a page."""

from typing import Any

from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.documents import DocumentKey, TaskDocuments, answer_texts

MOST_SAMPLES = 2000  # a page of more is too large to mail; the rest stays in samples.jsonl


def browser_data(
    task: ReportTask, *, other: ReportTask | None = None, other_name: str = "", traces: dict[str, Any] | None = None
) -> dict[str, Any]:
    sides = [(cell.name, cell, task.documents) for cell in task.cells if cell.records]
    if other is not None:
        sides += [(f"{cell.name} ({other_name})", cell, other.documents) for cell in other.cells if cell.records]
    keys = browser_keys(task, other)
    shown = keys[:MOST_SAMPLES]
    texts: dict[str, int] = {}
    configs = [
        {
            "name": name,
            "answers": [texts.setdefault(answer, len(texts)) if answer is not None else None for answer in answers],
            "marks": marks,
        }
        for name, answers, marks in (_side(name, cell, documents, shown) for name, cell, documents in sides)
    ]
    found = task.documents.documents if _fits(task) else {}
    documents = [list(found[key][:3]) if key in found else [None, None, None] for key in shown]
    return {
        "documents": documents,
        "names": [f"{key.task} {key.document}" for key in shown],
        "texts": list(texts),
        "configs": configs,
        "notes": _notes(task, len(keys), is_fitting=bool(found)),
        "traces": traces,
    }


def browser_keys(task: ReportTask, other: ReportTask | None = None) -> list[DocumentKey]:
    """Returns the documents that any config answered, in the order in which they are browsed."""
    cells = [*task.cells, *(other.cells if other else ())]
    records = (record for cell in cells for record in cell.records)
    return list(dict.fromkeys(DocumentKey(record.key.task, record.key.document) for record in records))


def _side(
    name: str, cell: ReportCell, documents: TaskDocuments, shown: list[DocumentKey]
) -> tuple[str, list[str | None], list[float | None]]:
    answers = answer_texts(cell.records, documents)
    return name, [answers.get(key) for key in shown], [cell.scores.get(key) for key in shown]


def _fits(task: ReportTask) -> bool:
    """Questions are shown only where they are those that were answered."""
    return all(task.documents.fit(cell.records) for cell in task.cells)


def _notes(task: ReportTask, count: int, *, is_fitting: bool) -> list[str]:
    found = []
    if task.source == "artifacts":
        found.append("Samples are not part of the artifacts; a run stores them in results/.")
    elif not count:
        found.append("No sample is stored.")
    elif task.documents.why_not:
        found.append(f"Questions and marks are missing here: {task.documents.why_not}.")
    elif not is_fitting:
        found.append("The task's prompts are not those that were answered, so questions and marks are left out.")
    if count > MOST_SAMPLES:
        found.append(f"The first {MOST_SAMPLES:,} of {count:,} samples; the rest is in samples.jsonl.")
    return found
