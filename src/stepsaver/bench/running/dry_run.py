"""What a run would do and about what it would cost, without weights and without writing anything."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from stepsaver.bench.experiment.folders import results_folder
from stepsaver.bench.experiment.spec import ConfigSpec, Experiment
from stepsaver.bench.results.chain import is_unsealed
from stepsaver.bench.results.identity import differing_parts, run_id
from stepsaver.bench.results.store import read_identity
from stepsaver.bench.results.stored_files import Timing
from stepsaver.bench.running.equal import find_equal
from stepsaver.bench.running.run import RunOptions, load, with_baselines
from stepsaver.bench.running.session import Chunk, ConfigRunner, Session, open_session
from stepsaver.bench.running.shards import stored_with_shards
from stepsaver.bench.running.worker import CellRequest, cell_request
from stepsaver.evaluation.generation_parameters import read_parameters

ASSUMED_TOKENS_PER_STEP = 2.8  # at threshold 0.9, of a small trained model
LOOKED_AT = 32  # requests whose length stands for all
MULTIPLIED = 1024  # rows and columns


@dataclass(frozen=True)
class Cost:
    forwards: float
    flops: float
    seconds: float

    def times(self, factor: float) -> "Cost":
        return Cost(factor * self.forwards, factor * self.flops, factor * self.seconds)


@dataclass(frozen=True)
class PlannedCell:
    """What is missing of a config on a task. `samples` include those that a baseline is only timed on again."""

    config: str
    chunks: int
    samples: int
    timed_again: int  # chunks of the baseline that are stored, and timed again beside other configs
    remark: str  # whatever happens to what is stored, or why nothing is run
    cost: Cost
    basis: str


@dataclass(frozen=True)
class PlannedTask:
    task: str
    chunks: int
    samples: int
    cells: tuple[PlannedCell, ...]
    notes: tuple[str, ...]  # on rules that cannot act on the task


def plan_run(experiment: Experiment, options: RunOptions) -> list[PlannedTask]:
    tasks = [load(name, experiment, options) for name in options.tasks]
    session = open_session(experiment, model_name=options.model, has_weights=False)
    requests = [cell_request(experiment, session, task, options.limit) for task in tasks]
    return [_plan_task(request, options, results_folder(experiment, options.model)) for request in requests]


def total_cost(planned: Sequence[PlannedTask]) -> Cost:
    costs = [cell.cost for task in planned for cell in task.cells]
    return Cost(
        sum(each.forwards for each in costs), sum(each.flops for each in costs), sum(each.seconds for each in costs)
    )


def _plan_task(request: CellRequest, options: RunOptions, results: Path) -> PlannedTask:
    experiment, chunks = request.experiment, request.chunks
    configs = with_baselines(experiment, options.configs)
    forced = {config.name for config in options.configs} if options.force else set[str]()
    runners = {config.name: ConfigRunner(request.session, experiment, config, request.task.path) for config in configs}
    equal = find_equal(request, runners)
    found = {config.name: _missing(request, config, results, is_forced=config.name in forced) for config in configs}
    timed_beside: dict[str, set[int]] = defaultdict(set)  # a baseline's name, and the chunks that others lack
    for name, (missing, _) in found.items():
        if name not in equal.leader_of:
            timed_beside[equal.computed_as(experiment.baseline_of(name))] |= missing
    cells = []
    for config in configs:
        missing, remark = found[config.name]
        again = timed_beside[config.name] - missing
        if leader := equal.leader_of.get(config.name):
            missing, remark = set(), f"equal to {leader} on this task: taken over, a few requests checked"
        samples = sum(len(chunk.samples) for chunk in chunks if chunk.number in missing | again)
        per_sample, basis = _cost_per_sample(request, config, results)
        cells.append(
            PlannedCell(config.name, len(missing), samples, len(again), remark, per_sample.times(samples), basis)
        )
    samples = sum(len(each.samples) for each in chunks)
    return PlannedTask(request.folder_name, len(chunks), samples, tuple(cells), tuple(equal.notes()))


def _missing(request: CellRequest, config: ConfigSpec, results: Path, *, is_forced: bool) -> tuple[set[int], str]:
    """The chunks to be run, and what happens to those that are stored."""
    numbers = {chunk.number for chunk in request.chunks}
    folder = results / request.folder_name / config.name
    stored = read_identity(folder)
    if stored is None:
        return numbers, ""
    if is_forced:
        return numbers, "what is stored is set aside"
    identity = request.identity(config)
    if stored["run_id"] != run_id(identity):
        other = ", ".join(differing_parts(stored["identity"], identity))
        return numbers, f"what is stored is of a run with another {other}; it is set aside"
    if is_unsealed(stored):
        return numbers, "what is stored is of the former format; it is set aside"
    return numbers.difference(*(cell.records for cell in stored_with_shards(folder))), ""


def _cost_per_sample(request: CellRequest, config: ConfigSpec, results: Path) -> tuple[Cost, str]:
    """By what is stored of the config on this task, else of the baseline, else by the lengths of the requests."""
    for name in (config.name, request.experiment.baseline_of(config.name)):
        timings = _stored_timings(request, results, name)
        if timings:
            samples = sum(each["samples"] for each in timings)
            totals = Cost(*(sum(each[field] for each in timings) for field in ("forwards", "flops", "seconds")))
            return totals.times(1 / samples), f"stored timings of {name} ({len(timings)} chunks)"
    rate = _multiplication_rate(request.session)
    return _by_length(request, rate), (
        f"the lengths of requests, decoded to their token limit without reuse, at the {rate / 1e9:.0f} GFLOP/s of a "
        "matrix multiplication on this machine; nothing was timed yet"
    )


def _stored_timings(request: CellRequest, results: Path, config: str) -> list[Timing]:
    """Of any run of the config on the task, whatever its limit."""
    task = request.task.name
    folders = [results / task / config, *sorted(results.glob(f"{task}_limit_*/{config}"))]
    return [timing for folder in folders for cell in stored_with_shards(folder) for timing in cell.own_timings]


@cache
def _multiplication_rate(session: Session) -> float:
    """Operations per second of a matrix multiplication, the most that a forward can reach."""
    one = torch.ones(MULTIPLIED, MULTIPLIED, dtype=session.model.dtype, device=session.device)
    (one @ one)[0, 0].item()
    started = perf_counter()
    (one @ one)[0, 0].item()
    return 2 * MULTIPLIED**3 / (perf_counter() - started)


def _by_length(request: CellRequest, flops_per_second: float) -> Cost:
    """Two operations per parameter and row; every step of a block runs all its rows."""
    session, block = request.session, request.session.decoding.block_size
    parameters = sum(each.numel() for each in session.model.parameters())
    forwards = rows = 0.0
    looked_at = _some_requests(request.chunks)
    for prompt, answer in _lengths(request, looked_at):
        steps = ceil(answer / ASSUMED_TOKENS_PER_STEP) + ceil(answer / block)  # and a commit per block
        forwards += 1 + steps
        rows += prompt + steps * block
    requests_per_sample = sum(len(each.requests) for each in request.chunks) / sum(
        len(each.samples) for each in request.chunks
    )
    share = requests_per_sample / len(looked_at)
    flops = share * rows * 2 * parameters
    return Cost(share * forwards / session.batch_size, flops, flops / flops_per_second)


def _some_requests(chunks: Sequence[Chunk]) -> list[Any]:
    requests = [request for chunk in chunks for request in chunk.requests]
    return requests[:: max(1, len(requests) // LOOKED_AT)]


def _lengths(request: CellRequest, requests: Sequence[Any]) -> Iterable[tuple[int, int]]:
    """Tokens of the prompt and of the answer: the limit of what is generated, or what is scored."""
    spec, session = request.experiment.spec, request.session
    baseline = request.experiment.config(spec.baseline)
    if request.task.path == "scoring":
        lm = ConfigRunner(session, request.experiment, baseline, request.task.path).lm
        yield from ((each.context, each.continuation) for each in lm.scored_lengths(list(requests)))
        return
    for each in requests:
        text, keywords = each.args
        parameters = read_parameters(
            keywords, default_new_tokens=spec.decoding.max_new_tokens, token_limit=spec.max_new_tokens
        )
        yield len(session.tokenizer.encode(text)), parameters.max_new_tokens
