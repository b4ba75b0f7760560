"""What a run would do and roughly what it would cost, without weights and without writing anything."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from stepsaver.bench.documents import Timing
from stepsaver.bench.equal import find_equal
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.folders import results_folder, stored_limits, task_folder
from stepsaver.bench.identity import differing_parts, run_id
from stepsaver.bench.run import RunRequest, load, with_baselines
from stepsaver.bench.session import Chunk, Session, TaskRun, open_session, prepare_task
from stepsaver.bench.store import read_cell_files, read_run
from stepsaver.evaluation.answering import read_parameters

ASSUMED_TOKENS_PER_STEP = 2.8  # at threshold 0.9, of a small trained model
ASSUMED_TOKENS = 330  # of a generated answer, where its limit is above: the source's 7B model on GSM8K
LOOKED_AT = 32  # requests whose lengths stand for those of all
MULTIPLIED = 1024  # rows and columns


@dataclass(frozen=True)
class Estimate:
    forwards: float
    flops: float
    seconds: float

    def times(self, factor: float) -> "Estimate":
        return Estimate(factor * self.forwards, factor * self.flops, factor * self.seconds)


@dataclass(frozen=True)
class CellEstimate:
    """What is missing of a cell. `samples` includes those on which a baseline is only timed again."""

    config: str
    chunks: int
    samples: int
    timed_again: int  # chunks of the baseline that are stored, and timed again beside other configs
    remark: str  # what happens to what is stored, or why nothing is run
    cost: Estimate
    basis: str


@dataclass(frozen=True)
class TaskEstimate:
    task: str
    chunks: int
    samples: int
    cells: tuple[CellEstimate, ...]
    notes: tuple[str, ...]  # on rules that cannot act on the task


@dataclass(frozen=True)
class Assumed:
    """What is taken for granted where nothing was timed."""

    tokens: int = ASSUMED_TOKENS  # of a generated answer
    tokens_per_s: float | None = None  # None: what a matrix multiplication on this machine gives

    def __str__(self) -> str:
        rate = f" at {self.tokens_per_s:g} tokens/s" if self.tokens_per_s else ""
        return f"{self.tokens} tokens for each generated answer{rate}"


def estimate_run(experiment: Experiment, request: RunRequest, assumed: Assumed | None = None) -> list[TaskEstimate]:
    """Returns what is missing of each task, and what it would cost."""
    tasks = [load(name, experiment, request) for name in request.tasks]
    session = open_session(experiment, model_name=request.model, has_weights=False)
    task_runs = [prepare_task(experiment, session, task, request.limit) for task in tasks]
    results = results_folder(experiment, request.model)
    return [_estimate_task(task_run, request, results, assumed or Assumed()) for task_run in task_runs]


def total_cost(estimates: Sequence[TaskEstimate]) -> Estimate:
    costs = [cell.cost for task in estimates for cell in task.cells]
    return Estimate(
        sum(each.forwards for each in costs), sum(each.flops for each in costs), sum(each.seconds for each in costs)
    )


def _estimate_task(task_run: TaskRun, request: RunRequest, results: Path, assumed: Assumed) -> TaskEstimate:
    experiment, chunks = task_run.experiment, task_run.chunks
    configs = with_baselines(experiment, request.configs, task_run.task.name)
    forced = {config.name for config in request.configs} if request.force else set[str]()
    equal = find_equal(task_run, configs)
    found = {config.name: _missing(task_run, config, results, is_forced=config.name in forced) for config in configs}
    timed_beside: dict[str, set[int]] = defaultdict(set)  # by what is timed beside configs, the chunks that they lack
    for name, (missing, _) in found.items():
        for other in experiment.timed_beside(name) if name not in equal.leader_of else ():
            timed_beside[equal.computed_as(other)] |= missing
    cells = []
    for config in configs:
        missing, remark = found[config.name]
        again = timed_beside[config.name] - missing
        repeated = _samples_of_repeats(task_run, config, results, request.repeats)
        if config.name in equal.leader_of:
            missing, remark, repeated = set(), "", 0  # its answers and timings are taken over, as a note says
        samples = sum(len(chunk.samples) for chunk in chunks if chunk.number in missing | again)
        per_sample, basis = _cost_per_sample(task_run, config, results, assumed)
        cost = per_sample.times(samples + repeated)
        cells.append(CellEstimate(config.name, len(missing), samples + repeated, len(again), remark, cost, basis))
    samples = sum(len(each.samples) for each in chunks)
    return TaskEstimate(task_run.folder_name, len(chunks), samples, tuple(cells), tuple(equal.notes()))


def _missing(task_run: TaskRun, config: ConfigSpec, results: Path, *, is_forced: bool) -> tuple[set[int], str]:
    """Returns the chunks to be run, and what happens to those that are stored."""
    numbers = {chunk.number for chunk in task_run.chunks}
    folder = results / task_run.folder_name / config.name
    stored = read_run(folder)
    if stored is None:
        return numbers, ""
    if is_forced:
        return numbers, "what is stored is set aside"
    identity = task_run.identity(config)
    if stored.run_id != run_id(identity):
        other = ", ".join(differing_parts(stored.identity, identity))
        return numbers, f"what is stored is of a run with another {other}; it is set aside"
    return numbers - read_cell_files(folder, stored.run_id).records.keys(), ""


def _samples_of_repeats(task_run: TaskRun, config: ConfigSpec, results: Path, repeats: int) -> int:
    """Returns how many samples are timed after the first time, as far as that is not stored."""
    folder = results / task_run.folder_name / config.name
    stored = read_run(folder)
    timed = read_cell_files(folder, stored.run_id).repeated if stored else set[tuple[int, int]]()
    return sum(
        len(chunk.samples)
        for repeat in range(1, repeats)
        for chunk in task_run.chunks
        if (chunk.number, repeat) not in timed
    )


def _cost_per_sample(task_run: TaskRun, config: ConfigSpec, results: Path, assumed: Assumed) -> tuple[Estimate, str]:
    """Returns the cost and its basis: timings of the config, else of its baseline, else the lengths of requests."""
    for name in (config.name, task_run.experiment.baseline_of(config.name)):
        timings = _stored_timings(task_run, results, name)
        if timings:
            samples = sum(each.samples for each in timings)
            totals = Estimate(
                *(sum(getattr(each, name) for each in timings) for name in ("forwards", "flops", "seconds"))
            )
            return totals.times(1 / samples), f"stored timings of {name} ({len(timings)} chunks)"
    if task_run.task.path == "generation" and assumed.tokens_per_s:
        found = _by_length(task_run, 1.0, assumed)
        seconds = _requests_per_sample(task_run) * assumed.tokens / assumed.tokens_per_s
        return Estimate(found.forwards, found.flops, seconds), f"{assumed}, which is assumed; nothing was timed yet"
    rate = _multiplication_rate(task_run.session)
    length = f"{assumed}, which is assumed," if task_run.task.path == "generation" else "the lengths of requests"
    return _by_length(task_run, rate, assumed), (
        f"{length} without reuse at the {rate / 1e9:.0f} GFLOP/s of a matrix multiplication on this machine; nothing "
        "was timed yet"
    )


def _stored_timings(task_run: TaskRun, results: Path, config: str) -> list[Timing]:
    """Returns the timings of all stored runs of the config on the task, whatever their limit."""
    task = task_run.task.name
    folders = [results / task_folder(task, limit) / config for limit in (None, *stored_limits(results, task))]
    stored = [(folder, run.run_id) for folder in folders if (run := read_run(folder))]
    return [timing for each in stored for timing in read_cell_files(*each).own_timings]


@cache
def _multiplication_rate(session: Session) -> float:
    """Returns the operations per second of a matrix multiplication, the most that a forward can reach."""
    one = torch.ones(MULTIPLIED, MULTIPLIED, dtype=session.model.dtype, device=session.device)
    (one @ one)[0, 0].item()
    started = perf_counter()
    (one @ one)[0, 0].item()
    return 2 * MULTIPLIED**3 / (perf_counter() - started)


def _by_length(task_run: TaskRun, flops_per_second: float, assumed: Assumed) -> Estimate:
    """Returns the cost of a sample: two operations per parameter and row, and all rows of a block in every step."""
    session, block = task_run.session, task_run.session.decoding.block_size
    parameters = sum(each.numel() for each in session.model.parameters())
    forwards = rows = 0.0
    looked_at = _some_requests(task_run.chunks)
    for prompt, answer in _lengths(task_run, looked_at, assumed):
        steps = ceil(answer / ASSUMED_TOKENS_PER_STEP) + ceil(answer / block)  # and a commit per block
        forwards += 1 + steps
        rows += prompt + steps * block
    share = _requests_per_sample(task_run) / len(looked_at)
    flops = share * rows * 2 * parameters
    return Estimate(share * forwards / session.batch_size, flops, flops / flops_per_second)


def _requests_per_sample(task_run: TaskRun) -> float:
    chunks = task_run.chunks
    return sum(len(each.requests) for each in chunks) / sum(len(each.samples) for each in chunks)


def _some_requests(chunks: Sequence[Chunk]) -> list[Any]:
    requests = [each for chunk in chunks for each in chunk.requests]
    return requests[:: max(1, len(requests) // LOOKED_AT)]


def _lengths(task_run: TaskRun, requests: Sequence[Any], assumed: Assumed) -> Iterable[tuple[int, int]]:
    """Yields the tokens of prompt and answer; a generated one is taken to have as many as is assumed, or its limit."""
    spec, session = task_run.experiment.spec, task_run.session
    baseline = task_run.experiment.config(spec.baseline)
    if task_run.task.path == "scoring":
        lm = task_run.runner(baseline).lm()
        yield from ((each.context, each.continuation) for each in lm.scored_lengths(list(requests)))
        return
    for each in requests:
        text, keywords = each.args
        parameters = read_parameters(
            keywords, default_new_tokens=spec.decoding.max_new_tokens, token_limit=spec.max_new_tokens
        )
        yield len(session.tokenizer.encode(text)), min(parameters.max_new_tokens, assumed.tokens)
