"""The documents that stored answers are about: question, expected answer, subject.

If a task is not available on this machine, or its prompts are no longer those that were answered, the answers are shown
without questions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from huggingface_hub import try_to_load_from_cache

from stepsaver.bench.documents import Identity
from stepsaver.bench.experiment import Experiment
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.evaluate import EvaluationOptions, build_requests
from stepsaver.evaluation.model_source import EMBEDDED, resolve_model
from stepsaver.evaluation.records import RequestKey, RequestRecord, request_digest
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task
from stepsaver.evaluation.tokenizer import TextTokenizer


class DocumentKey(NamedTuple):
    task: str
    document: int


class Document(NamedTuple):
    question: str
    target: str
    subject: str | None
    choices: tuple[str, ...]  # of a question that is answered by log-likelihood


@dataclass(frozen=True)
class TaskDocuments:
    """The documents of a task in its order; none, and the reason, if they are not available."""

    documents: dict[DocumentKey, Document] = field(default_factory=dict)
    why_not: str = ""
    loaded: LoadedTask | None = None
    digests: dict[RequestKey, str] = field(default_factory=dict)

    def fit(self, records: Sequence[RequestRecord]) -> bool:
        """Whether these answers were given to the prompts that the task has now."""
        return all(self.digests.get(record.key, record.digest) == record.digest for record in records)


def without_documents(why: str) -> TaskDocuments:
    return TaskDocuments(why_not=why)


class _Prompter:
    """As much of a model as it takes to build prompts: its tokenizer, if that is on this machine."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self.text_tokenizer = tokenizer
        self.tokenizer_name = tokenizer.fingerprint if tokenizer else ""

    def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
        assert self.text_tokenizer is not None, "without a tokenizer prompts are built without its template"
        return self.text_tokenizer.chat_prompt(chat_history, opens_answer=add_generation_prompt)


def _tokenizer_at_hand(model: str) -> TextTokenizer | None:
    """Returns a model's tokenizer if it is on this machine: nobody downloads a model to read a report."""
    if model == EMBEDDED or Path(model).expanduser().is_dir():
        return TextTokenizer(resolve_model(model))
    cached = try_to_load_from_cache(model, "tokenizer_config.json")
    return TextTokenizer(Path(cached).parent) if isinstance(cached, str) else None


def read_documents(
    experiment: Experiment,
    task: str,
    *,
    limit: int | None,
    model: str,
    data_dir: Path | None = None,
    identity: Identity | None = None,
) -> TaskDocuments:
    """Returns a task's documents. `identity` is their run's: shots, metric and limits may not be the file's."""
    spec, ran = experiment.spec, identity.as_json() if identity else {}
    shots = ran.get("num_fewshot")
    task_options = TaskOptions(
        data_dir=data_dir or spec.data_dir,
        num_fewshot=shots if isinstance(shots, int) else None,
        metric=ran.get("metric"),
    )
    try:
        loaded = load_task(task, task_options)
        tokenizer = _tokenizer_at_hand(model)
        options = EvaluationOptions(limit=limit, apply_chat_template=None if tokenizer else False)
        build_requests(cast(StepsaverLM, _Prompter(tokenizer)), loaded, options)
    except UsageError as error:
        return without_documents(str(error))
    settings = AdapterSettings(
        default_new_tokens=ran.get("max_new_tokens", spec.decoding.max_new_tokens),
        token_limit=ran.get("token_limit", spec.max_new_tokens),
        estimator=ran.get("estimator", spec.estimator),
    ).of_answers(loaded.path)
    has_members = len(loaded.harness["tasks"]) > 1
    documents, digests = {}, {}
    for name, member in loaded.harness["tasks"].items():
        for document, instances in _by_document(member):
            for instance in instances if tokenizer else ():  # other prompts than the run's have other digests
                digests[RequestKey(name, document, instance.idx, 0)] = request_digest((instance.args, settings))
            documents[DocumentKey(name, document)] = _document(member, instances, name if has_members else None)
    return TaskDocuments(documents, "", loaded, digests)


def _document(member: Any, instances: list[Any], group_member: str | None) -> Document:
    content = instances[0].doc
    subject = content.get("subject") if isinstance(content, dict) else None
    target = member.doc_to_target(content)
    choices = (
        ()
        if instances[0].request_type == "generate_until"
        else tuple(str(each.args[1]).strip() if len(each.args) > 1 else "" for each in instances)
    )
    if isinstance(target, int) and target < len(choices):
        target = choices[target]
    return Document(str(member.doc_to_text(content)), str(target), subject or group_member, choices)


def _by_document(member: Any) -> Iterator[tuple[int, list[Any]]]:
    grouped: dict[int, list[Any]] = defaultdict(list)
    for instance in member.instances:
        grouped[instance.doc_id].append(instance)
    for document, instances in grouped.items():
        yield document, sorted(instances, key=lambda each: each.idx)


def answer_texts(records: Sequence[RequestRecord], documents: TaskDocuments) -> dict[DocumentKey, str]:
    """Returns what a reader is shown of each document's answer: the text, or the choices with their log-likelihoods."""
    grouped: dict[DocumentKey, list[RequestRecord]] = defaultdict(list)
    for record in records:
        grouped[DocumentKey(record.key.task, record.key.document)].append(record)
    return {key: _answer(key, found, documents) for key, found in grouped.items()}


def _answer(key: DocumentKey, records: list[RequestRecord], documents: TaskDocuments) -> str:
    if records[0].path == "generation":
        return "\n\n".join(record.text or "" for record in records)
    document = documents.documents.get(key)
    values = [record.loglikelihood or 0.0 for record in records]
    names = document.choices if document and len(document.choices) == len(records) else ()
    lines = [
        f"{'→' if value == max(values) else ' '} {names[index] if names else f'choice {index + 1}'}  ({value:.2f})"
        for index, value in enumerate(values)
    ]
    return "\n".join(lines)
