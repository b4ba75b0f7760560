"""The accuracies of the training card: the engine on whole test files."""

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tokenizers import Tokenizer

from stepsaver.bench.statistics import Interval, share_interval
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import COMPUTED_STEPS, Trace
from stepsaver.evaluation.embedded import DATA_FOLDER
from training.problems import instructions, questions, word_problems
from training.problems.tokenizer import prompt_text

TOKEN_LIMITS = {word_problems.TASK: 96, instructions.TASK: 32}
BATCH = 128  # the tokens do not depend on it
CHOICES = 4
EVERYTHING = "all subjects"


@dataclass(frozen=True)
class Accuracy:
    """How many were right, of how many, and what decoding took."""

    right: int
    count: int
    tokens_per_step: float
    seconds: float

    @property
    def share(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> Interval:
        return share_interval(self.right, self.count)


def read_documents(task: str, *, limit: int | None = None, folder: Path = DATA_FOLDER) -> list[dict[str, Any]]:
    lines = (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def is_right(task: str, document: dict[str, Any], response: str) -> bool:
    if task == instructions.TASK:
        return instructions.obeys(document["kind"], document["arguments"], response)
    return word_problems.is_right(document, response)


def measure_generation(
    model: Transformer,
    tokenizer: Tokenizer,
    task: str,
    *,
    threshold: float | None,
    limit: int | None = None,
    batch: int = BATCH,
) -> Accuracy:
    """Returns the accuracy of plain decoding (no reuse) at a threshold; None is autoregressive, one row a block."""
    decoding = resolve_decoding(model.config, block_size=1 if threshold is None else None)
    policy = Threshold() if threshold is None else Threshold(threshold)
    engine = Engine(model, decoder=Denoise(policy), batch_size=batch, decoding=decoding)
    documents = read_documents(task, limit=limit)
    field = "prompt" if task == instructions.TASK else "question"
    prompts = [tokenizer.encode(prompt_text(document[field])).ids for document in documents]
    trace = Trace()
    started = perf_counter()
    right = 0
    for completion in engine.generate(prompts, max_new_tokens=TOKEN_LIMITS[task], trace=trace):
        response = tokenizer.decode(completion.ids, skip_special_tokens=True)
        right += is_right(task, documents[completion.index], response)
    return Accuracy(right, len(documents), tokens_per_step(trace), perf_counter() - started)


def measure_choices(
    model: Transformer, tokenizer: Tokenizer, *, limit: int | None = None, batch: int = BATCH
) -> dict[str, Accuracy]:
    """Returns the accuracy of all subjects and of each: the choice with the highest log-likelihood along the decode
    trajectory is the answer.
    """
    documents = read_documents(questions.TASK, limit=limit)
    requests = [
        ScoreRequest(
            tuple(tokenizer.encode(prompt_text(document["question"])).ids), tuple(tokenizer.encode(choice).ids)
        )
        for document in documents
        for choice in document["choices"]
    ]
    trace = Trace()
    started = perf_counter()
    scored = Engine(model, decoder=Denoise(Threshold()), batch_size=batch).score(requests, trace=trace)
    likelihoods = {score.index: score.loglikelihood for score in scored}
    seconds = perf_counter() - started
    tally: dict[str, list[bool]] = {EVERYTHING: []}
    for index, document in enumerate(documents):
        choices = [likelihoods[CHOICES * index + number] for number in range(CHOICES)]
        right = choices.index(max(choices)) == document["answer"]
        tally[EVERYTHING].append(right)
        tally.setdefault(document["subject"], []).append(right)
    rate = tokens_per_step(trace)
    return {subject: Accuracy(sum(found), len(found), rate, seconds) for subject, found in tally.items()}


def tokens_per_step(trace: Trace) -> float:
    """Returns unmasked rows per denoising step of a sample; commits and prefills unmask at most a block's first row."""
    steps = [entry for entry in trace.entries if entry.kind in COMPUTED_STEPS]
    return sum(entry.unmasked for entry in steps) / len(steps) if steps else 1.0


def percentage(accuracy: Accuracy) -> str:
    _, low, high = accuracy.interval
    return f"{100 * accuracy.share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def checkpoint_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
