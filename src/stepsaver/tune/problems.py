"""The problems of a tuning: some to search on, others to confirm on, and never the same."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace

from lm_eval.api.instance import Instance

from stepsaver.bench.cells import CellRun
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.session import (
    Chunk,
    SampleKey,
    Session,
    TaskRun,
    checked_task_run,
    divided,
    prepare_task,
)
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.evaluate import answer_values
from stepsaver.evaluation.recipe import Measure
from stepsaver.evaluation.task_loading import LoadedTask
from stepsaver.tune.agreement import agreement, how_compared

SEARCHED = 0.3  # of a task's problems, if it names no others to confirm on
LEAST_CHUNKS = 2
LEAST_SAMPLES = 16  # of a chunk


def chunk_samples(batch_size: int) -> int:
    """Returns two batches, so that a chunk's last samples, which leave slots empty, weigh no more than in other
    experiments.
    """
    return max(LEAST_SAMPLES, 2 * batch_size)


@dataclass(frozen=True)
class Problems:
    """Chunks of a task, and how a candidate's answers to them are compared with the baseline's."""

    task_run: TaskRun
    chunks: tuple[Chunk, ...]
    measure: Measure = "accuracy"
    pattern: re.Pattern[str] | None = None

    @property
    def count(self) -> int:
        return sum(len(chunk.samples) for chunk in self.chunks)

    def differences(self, ours: CellRun, baseline: CellRun, chunk: Chunk) -> list[float]:
        """Returns how much less right each answer to a chunk is than the baseline's. Both cells must have the chunk."""
        records, plain = ours.stored.records[chunk.number], baseline.stored.records[chunk.number]
        if self.measure == "agreement":
            theirs = {record.key: record for record in plain}
            return [1 - agreement(each, theirs[each.key], self.pattern) for each in records]
        after, before = (
            {
                (each.task, each.document): each.value
                for each in answer_values(self.task_run.task, chunk.requests, found)
            }
            for found in (records, plain)
        )
        return [before[key] - after[key] for key in before]


@dataclass(frozen=True)
class SplitProblems:
    search: Problems
    fresh: Problems


def task_problems(
    experiment: Experiment, session: Session, task: LoadedTask, fresh: LoadedTask | None
) -> SplitProblems:
    """Returns a task's problems to search on and those of `fresh` to confirm on; without it, the task's are divided."""
    task_run = prepare_task(experiment, session, task, None)
    if fresh is not None:
        others = prepare_task(experiment, session, fresh, None)
        return SplitProblems(Problems(task_run, task_run.chunks), Problems(others, others.chunks))
    return _divided(Problems(task_run, task_run.chunks))


def prompt_problems(
    experiment: Experiment,
    session: Session,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    pattern: re.Pattern[str] | None,
) -> SplitProblems:
    """Returns prompts without labels as problems, made into a task of their own and divided."""
    name = experiment.spec.tasks[0]
    keywords = {"until": [], "do_sample": False, "max_gen_toks": max_new_tokens}
    instances = [
        Instance("generate_until", {"prompt": text}, (text, keywords), 0, metadata=(name, index, 1))
        for index, text in enumerate(prompts)
    ]
    size = experiment.spec.chunk_of(session.batch_size)
    chunks = tuple(
        Chunk(number, tuple(SampleKey(name, each.doc_id) for each in members), members)
        for number, members in enumerate(divided(instances, size))
    )
    stub = SimpleNamespace(config=SimpleNamespace(num_fewshot=0))
    task = LoadedTask(name, "generation", f"agreement,{how_compared(pattern)}", (), False, {"tasks": {name: stub}})
    task_run = checked_task_run(experiment, session, task, None, chunks)
    return _divided(Problems(task_run, chunks, "agreement", pattern))


def _divided(problems: Problems) -> SplitProblems:
    chunks = problems.chunks
    searched = max(LEAST_CHUNKS, ceil(SEARCHED * len(chunks)))
    if len(chunks) < searched + LEAST_CHUNKS:
        raise UsageError(
            f"{problems.count} problems are too few: some to search on and others to confirm on, in chunks of "
            f"{len(chunks[0].samples) if chunks else 0}, make at least {searched + LEAST_CHUNKS} chunks"
        )
    parts = (
        Problems(problems.task_run, part, problems.measure, problems.pattern)
        for part in (chunks[:searched], chunks[searched:])
    )
    return SplitProblems(*parts)
