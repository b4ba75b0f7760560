"""From stored chunks to `summary.json`: accuracy, throughput, paired comparison with the baseline, provenance."""

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

from stepsaver.bench.experiment.conditions import Criterion
from stepsaver.bench.judging.rates import median_rate
from stepsaver.bench.judging.statistics import bootstrap_p, median_interval, paired_drop, share_interval
from stepsaver.bench.results.store import CellFiles
from stepsaver.bench.results.stored_files import Timing
from stepsaver.bench.running.cell_run import CellRun, check_coverage
from stepsaver.bench.running.chunks import Chunk
from stepsaver.bench.running.config_runner import ConfigRunner
from stepsaver.bench.running.equal import EqualConfigs, follow
from stepsaver.bench.running.repeat import disturbed_chunks
from stepsaver.bench.running.step_counts import counted_ceiling, merge_counts
from stepsaver.bench.running.task_run import TaskRun
from stepsaver.evaluation.adapter import StepsaverLM
from stepsaver.evaluation.evaluate import EvaluationOptions, TaskResult, evaluate_task
from stepsaver.evaluation.model_source import hub_revision

INVARIANCE_SAMPLES = 4
# What a run was effectively done with, besides its model.
EFFECTIVE = (
    "limit",
    "num_fewshot",
    "metric",
    "batch_size",
    "dtype",
    "weights",
    "device",
    "chunk_samples",
    "seed",
    "policy",
    "rules",
    "decoding",
    "max_new_tokens",
    "token_limit",
    "estimator",
)


def summarise(task_run: TaskRun, cells: dict[str, CellRun], equal: EqualConfigs) -> None:
    chunks = task_run.chunks
    checked = {name: follow(cells[name], cells[leader], chunks) for name, leader in equal.leader_of.items()}
    for cell in cells.values():
        check_coverage(chunks, cell.stored)
    disturbed = disturbed_chunks({name: each for name, each in cells.items() if name not in equal.leader_of})
    scored = {name: score_cell(task_run, cell) for name, cell in cells.items()}
    for name, cell in cells.items():
        # an equal config's timings stand for the baseline's: it was timed beside the others in every session
        baseline = equal.computed_as(task_run.experiment.baseline_of(name))
        summary = build_summary(task_run, cell, cells[baseline], scored[name], scored[baseline])
        summary["disturbed_chunks"] = sorted({each.chunk for each in disturbed if each.config == name})
        summary["inert_rules"] = [each._asdict() for each in equal.inert.get(name, ())]
        summary["equal_to"] = equal.leader_of.get(name)
        summary["spot_check"] = checked.get(name)
        summary["batch_invariance"] = batch_invariance(task_run, cell, chunks[0])
        cell.stored.write_summary(summary)


def batch_invariance(task_run: TaskRun, cell: CellRun, chunk: Chunk) -> dict[str, int]:
    """Decodes a few stored samples again, each alone, and counts those that come out differently."""
    session = replace(task_run.session, batch_size=1)
    alone = ConfigRunner(session, task_run.experiment, cell.runner.config, task_run.task.path)
    stored = {record.key: record for record in cell.stored.records[chunk.number]}
    few = [
        each for each in chunk.requests if each.doc_id in {key.document for key in chunk.samples[:INVARIANCE_SAMPLES]}
    ]
    different = 0
    for place in range(len(few)):
        records, _ = alone.run_chunk(few[place : place + 1], chunk=chunk.number, samples=1)
        different += any(
            each.ids != stored[each.key].ids or not _close(each.loglikelihood, stored[each.key].loglikelihood)
            for each in records
        )
    return {"samples": len(few), "different": different}


def _close(one: float | None, other: float | None) -> bool:
    return one is other or (one is not None and other is not None and abs(one - other) < 1e-4)


def score_cell(task_run: TaskRun, cell: CellRun) -> TaskResult:
    """The task's metrics from the stored answers; nothing is run."""
    runner = cell.runner
    lm = StepsaverLM(
        runner.engine, task_run.session.tokenizer, settings=runner.lm.settings, known=cell.stored.all_records
    )
    return evaluate_task(lm, task_run.task, EvaluationOptions(limit=task_run.limit))


def chunk_pairs(timings: list[Timing], baseline: list[Timing]) -> list[tuple[Timing, Timing]]:
    """Timings of the same chunk in the same session, config and baseline; none of those that shared their machine."""
    theirs = {(each["session"], each["chunk"]): each for each in baseline if each["comparable"]}
    ours = [each for each in timings if each["comparable"]]
    return [(each, theirs[key]) for each in ours if (key := (each["session"], each["chunk"])) in theirs]


def speed_ups(pairs: list[tuple[Timing, Timing]]) -> dict[str, list[float]]:
    """By tokens per second and by seconds per sample: garbage raises the first, short answers the second."""
    rates = [(ours["tokens"] / ours["seconds"]) / (base["tokens"] / base["seconds"]) for ours, base in pairs]
    times = [(base["seconds"] / base["samples"]) / (ours["seconds"] / ours["samples"]) for ours, base in pairs]
    return {"tokens_per_s": rates, "seconds_per_sample": times}


def confirmation_p(ratios: dict[str, list[float]], drops: list[float], wanted: Criterion) -> float:
    """A p-value against "does not meet both bounds": the largest of those against each bound."""
    if not drops or not all(ratios.values()):
        return 1.0
    up, drop = wanted.speed_up, wanted.drop_points
    values = [0.0]  # a bound on what was measured is no hypothesis about the rest
    if not up.is_measured:
        values += [bootstrap_p(each, up.bound, statistic="median", above=up.sign == ">") for each in ratios.values()]
    if not drop.is_measured:
        values.append(bootstrap_p(drops, drop.bound / 100, statistic="mean", above=drop.sign == ">"))
    return max(values)


def build_summary(
    task_run: TaskRun, cell: CellRun, baseline: CellRun, result: TaskResult, baseline_result: TaskResult
) -> dict[str, Any]:
    timings, base_timings = cell.stored.own_timings, baseline.stored.own_timings
    total = _totals(timings)
    values = {(each.task, each.document): each.value for each in result.documents}
    base_values = {(each.task, each.document): each.value for each in baseline_result.documents}
    assert values.keys() == base_values.keys(), "config and baseline were scored on the same samples"
    keys = sorted(values)
    name, experiment = cell.runner.config.name, task_run.experiment
    drop = paired_drop([base_values[key] for key in keys], [values[key] for key in keys])
    pairs = chunk_pairs(cell.stored.counting_timings, baseline.stored.counting_timings)
    rate = median_rate([ours for ours, _ in pairs])
    accuracy = share_interval(sum(values.values()), len(values))
    ups = speed_ups(pairs)
    return {
        "task": task_run.task.name,
        "config": name,
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "accuracy": result.accuracy,
        "accuracy_metric": result.metric,
        "accuracy_interval": [accuracy.low, accuracy.high],
        "beside": result.beside,
        "groups": result.members(),
        "samples": len(values),
        "baseline": experiment.baseline_of(name),
        "is_baseline": name in experiment.baselines,
        "paired": {
            "drop_points": list(drop.drop.scaled(100)),
            "lost": drop.lost,
            "won": drop.won,
            "mcnemar_p": drop.p_value,
        },
        "speed_up": {name: list(median_interval(ratios)) for name, ratios in ups.items()},
        "speed_up_chunks": len(pairs),
        "rate": list(rate) if rate else None,  # tokens/s of the chunks that the speed-up is made of
        "timed_again": _timed_again(cell.stored),
        "chunks": len(timings),
        "chunks_not_comparable": sum(not each["comparable"] for each in timings),
        "sessions": len({each["session"] for each in timings}),
        "confirmation_p": confirmation_p(
            ups, [base_values[key] - values[key] for key in keys], experiment.success_of(name).confirm_if
        ),
        "predicted_speed_up": _predicted(timings, base_timings),
        "predicted_here": _predicted_here(pairs),
        "ceiling": counted_ceiling(
            cell.runner.engine, cell.runner.config.parsed_rules(), (each["steps"] for each in base_timings)
        ),
        "throughput": {
            "tokens": total["tokens"],
            "requests": total["requests"],
            "decode_seconds": total["seconds"],
            "tokens_per_s": total["tokens"] / total["seconds"] if total["seconds"] else None,
            "requests_per_s": total["requests"] / total["seconds"] if total["seconds"] else None,
            "loading_seconds": max((each["loading_seconds"] for each in timings), default=0.0),
            "warm_up_seconds": max((each["warm_up_seconds"] for each in timings), default=0.0),
        },
        "tokens_before_stop": _tokens_before_stop(cell.stored),
        "cost": {
            name: total[name] for name in ("forwards", "denoising_steps", "flops", "row_layers", "row_layers_reused")
        }
        | {"by_kind": _kinds(timings)},
        "steps": merge_counts(each["steps"] for each in timings),
        "sample_forwards": _known_sum(timings, "sample_forwards"),
        "planning_seconds": _known_sum(timings, "planning_seconds"),
        "peak_memory_bytes": max((each["peak_memory_bytes"] for each in timings), default=0),
        "gpu_info": ", ".join(sorted({each["gpu"] for each in timings if each["gpu"]})) or None,
        "git": cell.stored.provenance.get("git"),
        "environment": cell.stored.provenance.get("environment"),
        "machine": cell.stored.provenance.get("machine"),
        "other_cores": _other_cores(timings),
        "model_args": {
            "model": task_run.session.name,
            "revision": hub_revision(task_run.session.folder),
            "dtype": cell.identity["dtype"],
        },
        "eval_params": {name: cell.identity[name] for name in EFFECTIVE},
        "run_id": cell.stored.run_id,
        "identity": cell.identity,
    }


def _tokens_before_stop(files: CellFiles) -> int | None:
    """Of what was generated, the tokens without those that ended it; none of a task that is scored."""
    generated = [record for record in files.all_records if record.path == "generation"]
    return sum(record.tokens - (record.finish == "stop") for record in generated) if generated else None


def _timed_again(files: CellFiles) -> list[dict[str, Any]]:
    """The seconds that count, and those of the disturbed timing before, which stays on record."""
    before = {(each["chunk"], each["session"]): each["seconds"] for each in files.timings}
    return [
        {"chunk": chunk, "seconds": each["seconds"], "seconds_before": before[chunk, session]}
        for (chunk, session), each in files.repeats.items()
        if (chunk, session) in before
    ]


def _other_cores(timings: list[Timing]) -> dict[str, float] | None:
    """How many cores others kept busy meanwhile, over the chunks; None where no system said it."""
    known = [each["other_cores"] for each in timings if each.get("other_cores") is not None]
    return {"median": median(known), "largest": max(known)} if known else None


def _totals(timings: list[Timing]) -> dict[str, float]:
    names = ("tokens", "requests", "seconds", "forwards", "denoising_steps", "flops", "row_layers", "row_layers_reused")
    return {name: sum(each[name] for each in timings) for name in names}


def _known_sum(timings: list[Timing], name: str) -> float | None:
    """None if any chunk was run before this was counted."""
    return sum(each[name] for each in timings) if timings and all(name in each for each in timings) else None


def _kinds(timings: list[Timing]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for timing in timings:
        for kind, figures in timing["by_kind"].items():
            for name, value in figures.items():
                totals[kind][name] += value
    return {kind: dict(figures) for kind, figures in totals.items()}


def _predicted(timings: list[Timing], baseline: list[Timing]) -> float | None:
    """The speed-up in tokens per second by operations alone."""
    ours, base = _totals(timings), _totals(baseline)
    if not (ours["tokens"] and base["tokens"] and ours["flops"]):
        return None
    return (base["flops"] / base["tokens"]) / (ours["flops"] / ours["tokens"])


def _predicted_here(pairs: list[tuple[Timing, Timing]]) -> float | None:
    """The same by what rows were measured to take on the machine of each pair; none where nobody measured it."""
    known = [pair for pair in pairs if all(each.get("predicted_seconds") and each["tokens"] for each in pair)]
    if not known:
        return None
    ours, base = (
        sum(each["predicted_seconds"] for each in side) / sum(each["tokens"] for each in side)
        for side in zip(*known, strict=True)
    )
    return base / ours
