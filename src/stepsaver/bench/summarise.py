"""From stored chunks to `summary.json`: accuracy, throughput, paired comparison with the baseline, provenance."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from stepsaver.bench.cells import CellRun, check_coverage, disturbed_chunks
from stepsaver.bench.documents import (
    BatchInvariance,
    CostTotals,
    Inert,
    Kinds,
    ModelParameters,
    OtherCores,
    PairedAnswers,
    Summary,
    Throughput,
    TimedAgain,
    Timing,
)
from stepsaver.bench.equal import EqualConfigs, follow
from stepsaver.bench.identity import differing_parts
from stepsaver.bench.session import Chunk, ConfigRunner, TaskRun
from stepsaver.bench.statistics import paired, share_interval
from stepsaver.bench.store import CellFiles
from stepsaver.bench.timings import Faster, chunk_pairs, compare_speeds, confirmation_p, median_rate, predicted_speed_up
from stepsaver.engine import registry
from stepsaver.evaluation.evaluate import EvaluationOptions, TaskResult, evaluate_task
from stepsaver.evaluation.inert import inert_setting
from stepsaver.evaluation.model_source import hub_revision
from stepsaver.evaluation.records import RequestRecord

INVARIANCE_SAMPLES = 4
# The settings that a run really had, besides its model.
EFFECTIVE = (
    "limit", "num_fewshot", "metric", "batch_size", "dtype", "weights", "device", "chunk_samples", "seed", "decode",
    "policy", "rules", "decoding", "max_new_tokens", "token_limit", "estimator",
)  # fmt: skip


def summarise(task_run: TaskRun, cells: dict[str, CellRun], equal: EqualConfigs) -> None:
    """Writes the scores and the summary of every cell. All chunks have to be there."""
    checked = {name: follow(cells[name], cells[leader], task_run.chunks) for name, leader in equal.leader_of.items()}
    for cell in cells.values():
        check_coverage(task_run.chunks, cell.stored)
    disturbed = disturbed_chunks({name: each for name, each in cells.items() if name not in equal.leader_of})
    scored = {name: score_cell(task_run, cell) for name, cell in cells.items()}
    experiment, counting = task_run.experiment, {name: each.stored.counting_timings for name, each in cells.items()}
    # if the baseline took over an equal config's answers, that one was timed beside the others in every session
    baselines = {name: equal.computed_as(experiment.baseline_of(name)) for name in cells}
    faster = compare_speeds({name: chunk_pairs(counting[name], counting[other]) for name, other in baselines.items()})
    reference = equal.computed_as(experiment.reference) if experiment.reference else ""
    beside = counting.get(reference, [])
    over_reference = compare_speeds({name: chunk_pairs(mine, beside) for name, mine in counting.items()})
    for name, cell in cells.items():
        baseline = baselines[name]
        cell.stored.write_scores(scored[name].documents)
        summary = build_summary(task_run, cell, cells[baseline], scored[name], scored[baseline], faster[name])
        inert = [Inert(**each._asdict()) for each in equal.inert.get(name, ())]
        more = {
            "over_reference": over_reference[name].stored() if reference else None,
            "is_control": not (summary.is_baseline or summary.is_reference)
            and _does_the_same(summary, cell, cells[baseline])
            and _cannot_act(cell, inert),
            "disturbed_chunks": sorted({each.chunk for each in disturbed if each.config == name}),
            "inert_rules": inert,
            "equal_to": equal.leader_of.get(name),
            "spot_check": checked.get(name),
            "batch_invariance": batch_invariance(task_run, cell, task_run.chunks[0]),
        }
        cell.stored.write_summary(summary.model_copy(update=more))


def _does_the_same(summary: Summary, cell: CellRun, baseline: CellRun) -> bool:
    """Whether a config executed the baseline's operations and gave its answers, decoded as it was but for rules."""
    ours, theirs = ([(each.flops, each.tokens) for each in side.stored.own_timings] for side in (cell, baseline))
    is_same_text = not summary.different_answers and set(summary.unlike_baseline) <= {"rules", "plugins"}
    return is_same_text and ours == theirs


def _cannot_act(cell: CellRun, inert: Sequence[Inert]) -> bool:
    named = {each.rule for each in inert}
    return all(inert_setting(rule) or registry.describe(rule) in named for rule in cell.runner.engine.decoder.rules)


def batch_invariance(task_run: TaskRun, cell: CellRun, chunk: Chunk) -> BatchInvariance:
    """Decodes a few stored samples again, each alone, and counts those that come out differently."""
    session = replace(task_run.session, batch_size=1)
    alone = ConfigRunner(session, task_run.experiment, cell.runner.config, task_run.task)
    stored = {record.key: record for record in cell.stored.records[chunk.number]}
    few = {key.document for key in chunk.samples[:INVARIANCE_SAMPLES]}
    requests = [each for each in chunk.requests if each.doc_id in few]
    different = 0
    for request in requests:
        records, _ = alone.run_chunk([request], chunk=chunk.number, samples=1)
        different += any(
            each.ids != stored[each.key].ids or not _close(each.loglikelihood, stored[each.key].loglikelihood)
            for each in records
        )
    return BatchInvariance(samples=len(requests), different=different)


def _close(one: float | None, other: float | None) -> bool:
    return one is other or (one is not None and other is not None and abs(one - other) < 1e-4)


def score_cell(task_run: TaskRun, cell: CellRun) -> TaskResult:
    """Returns the task's metrics from the stored answers; nothing is run."""
    lm = cell.runner.lm(known=cell.stored.all_records)
    return evaluate_task(lm, task_run.task, EvaluationOptions(limit=task_run.limit))


def build_summary(
    task_run: TaskRun,
    cell: CellRun,
    baseline: CellRun,
    result: TaskResult,
    baseline_result: TaskResult,
    faster: Faster,
) -> Summary:
    """Returns all that follows from the stored chunks of a cell and of its baseline; nothing is run."""
    timings, base_timings = cell.stored.own_timings, baseline.stored.own_timings
    values = {(each.task, each.document): each.value for each in result.documents}
    base_values = {(each.task, each.document): each.value for each in baseline_result.documents}
    keys = sorted(values.keys() & base_values.keys())
    name, experiment, identity = cell.runner.config.name, task_run.experiment, cell.identity
    scores = paired([base_values[key] for key in keys], [values[key] for key in keys])
    pairs = chunk_pairs(cell.stored.counting_timings, baseline.stored.counting_timings)
    accuracy = share_interval(sum(values.values()), len(values))
    predicted, by = predicted_speed_up(pairs, timings, base_timings)
    effective, provenance = identity.as_json(), cell.stored.provenance
    assert provenance is not None, "an open cell says where its run began"
    return Summary(
        task=task_run.task.name,
        config=name,
        timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        accuracy=result.accuracy,
        accuracy_metric=result.metric,
        accuracy_interval=[accuracy.low, accuracy.high],
        beside=result.beside,
        groups=result.members(),
        samples=len(values),
        baseline=experiment.baseline_of(name),
        is_baseline=name in experiment.baselines,
        is_reference=experiment.is_reference(name),
        is_control=False,
        unlike_baseline=differing_parts(identity, baseline.identity),
        different_answers=_different_answers(cell.stored, baseline.stored),
        paired=PairedAnswers(
            drop_points=scores.drop().scaled(100),
            test=scores.test,
            lost=scores.lost,
            won=scores.won,
            mcnemar_p=scores.mcnemar_p(),
        ),
        speed_up=faster.stored(),
        over_reference=None,
        pairs=len(pairs),
        rate=median_rate([ours for ours, _ in pairs]),
        timed_again=_timed_again(cell.stored),
        chunks=len(timings),
        chunks_not_comparable=sum(not each.comparable for each in timings),
        sessions=len({ours.process for ours, _ in pairs}),
        confirmation_p=confirmation_p(faster, scores, experiment.success_of(name).confirm_if),
        predicted=predicted,
        predicted_by=by,
        throughput=_throughput(timings),
        tokens_before_stop=tokens_before_stop(cell.stored.all_records),
        cost=cost_totals(timings),
        sample_forwards=sum(each.sample_forwards for each in timings),
        planning_seconds=sum(each.planning_seconds for each in timings),
        peak_memory_bytes=max(each.peak_memory_bytes for each in timings),
        gpu_info=", ".join(sorted({each.gpu for each in timings if each.gpu})) or None,
        git=provenance.git,
        environment=provenance.environment,
        machine=provenance.machine,
        model_args=ModelParameters(
            model=task_run.session.name, revision=hub_revision(task_run.session.folder), dtype=identity.dtype
        ),
        eval_params={each: effective[each] for each in EFFECTIVE},
        run_id=cell.stored.run_id,
        identity=identity,
        other_cores=_other_cores(timings),
        disturbed_chunks=[],
        inert_rules=[],
        equal_to=None,
        spot_check=None,
        batch_invariance=BatchInvariance(samples=0, different=0),
    )


def _different_answers(cell: CellFiles, baseline: CellFiles) -> int:
    theirs = {each.key: (each.ids, each.loglikelihood) for each in baseline.all_records}
    return sum((each.ids, each.loglikelihood) != theirs.get(each.key) for each in cell.all_records)


def tokens_before_stop(records: Sequence[RequestRecord]) -> int | None:
    """Returns the number of generated tokens without the stop tokens; None for a task that is scored."""
    generated = [record for record in records if record.path == "generation"]
    return sum(record.tokens - (record.finish == "stop") for record in generated) if generated else None


def _timed_again(files: CellFiles) -> list[TimedAgain]:
    before = {each.key: each.seconds for each in files.timings}
    return [
        TimedAgain(chunk=each.chunk, seconds=each.seconds, seconds_before=before[replaced])
        for replaced, each in files.replacements.items()
        if replaced in before
    ]


def _other_cores(timings: Sequence[Timing]) -> OtherCores | None:
    """Returns None if the system did not say it for any chunk."""
    known = [each.other_cores for each in timings if each.other_cores is not None]
    return OtherCores(median=median(known), largest=max(known)) if known else None


def _throughput(timings: Sequence[Timing]) -> Throughput:
    tokens, requests = sum(each.tokens for each in timings), sum(each.requests for each in timings)
    seconds = sum(each.seconds for each in timings)
    return Throughput(
        tokens=tokens,
        requests=requests,
        decode_seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else None,
        requests_per_s=requests / seconds if seconds else None,
        loading_seconds=max(each.loading_seconds for each in timings),
        warm_up_seconds=max(each.warm_up_seconds for each in timings),
    )


def cost_totals(timings: Sequence[Timing]) -> CostTotals:
    return CostTotals(
        forwards=sum(each.forwards for each in timings),
        denoising_steps=sum(each.denoising_steps for each in timings),
        flops=sum(each.flops for each in timings),
        row_layers=sum(each.row_layers for each in timings),
        row_layers_reused=sum(each.row_layers_reused for each in timings),
        by_kind=_kinds(timings),
    )


def _kinds(timings: Sequence[Timing]) -> Kinds:
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for timing in timings:
        for kind, figures in timing.by_kind.items():
            totals[kind].update(figures)
    return {kind: {name: float(value) for name, value in figures.items()} for kind, figures in totals.items()}
