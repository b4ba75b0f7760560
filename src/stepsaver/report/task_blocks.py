"""The blocks of one task: the verdict's figure, the table, the audit, where work goes, samples, provenance."""

from collections.abc import Sequence
from typing import Any

from stepsaver.bench.documents import Summary
from stepsaver.report.blocks import Block, TableEntry, cell, facts, figure, interval, notes, number, table
from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.figures import ACCURACY_SPEED, FIGURES, points, scatter, wanted_regions
from stepsaver.report.parallelism import parallelism_blocks

COLUMNS = (
    "config", "accuracy", "drop (points)", "tokens", "tokens/s", "speed-up", "predicted",
    "forwards", "row-layers", "deltas reused", "verdict",
)  # fmt: skip
TONES = {"confirmed": "good", "rejected": "bad", "running": "open", "failed": "bad", "incomplete": "open"}


def task_blocks(task: ReportTask, *, other: ReportTask | None = None, other_name: str = "") -> list[Block]:
    """Returns everything but the samples, which have a part of the page of their own."""
    drawn = [each for each in FIGURES if each is not ACCURACY_SPEED and each.is_there(task)]
    blocks = [_first_figure(task, other, other_name)] if ACCURACY_SPEED.is_there(task) else []
    blocks.append(result_table(task))
    if other is not None:
        blocks.append(comparison_table(task, other, other_name))
    blocks += parallelism_blocks(task)
    blocks.append(_findings(task))
    blocks += [
        figure(each.title, each.for_page(task), caption=each.caption, name=each.name, is_half=len(drawn) == 2)
        for each in drawn
    ]
    return blocks


def _first_figure(task: ReportTask, other: ReportTask | None, other_name: str) -> Block:
    caption, drawn = ACCURACY_SPEED.caption, ACCURACY_SPEED.for_page(task)
    if other is not None:
        drawn = scatter({"": points(task), other_name: points(other)}, wanted_regions(task))
        caption += f" Open marks are of {other_name}, in the colour of the config of the same name."
    return figure(ACCURACY_SPEED.title, drawn, caption=caption, name=ACCURACY_SPEED.name)


def result_table(task: ReportTask) -> Block:
    outcomes = {each.config: (each.outcome, each.reason) for each in task.verdict().configs} if task.done else {}
    rows = [_row(each, *outcomes.get(each.name, ("baseline", "")), _remark(task, each)) for each in task.cells]
    caption = (
        "Intervals are 95 %. The speed-up is the smaller one of tokens per second and seconds per sample, measured "
        "beside the config's baseline on the same chunks; tokens/s is the median over these chunks. A control does "
        "exactly the baseline's work. `Predicted` is by what a forward was measured to cost, or by operations."
    )
    return table("Results", COLUMNS, rows, caption=caption, name="results")


def _remark(task: ReportTask, each: ReportCell) -> str:
    """Returns what one must know about a config's figures: whose answers they are, and an unusual baseline."""
    equal, baseline = each.summary.equal_to if each.summary else None, task.experiment.baseline_of(each.name)
    is_usual = baseline in (task.experiment.spec.baseline, each.name)
    return ", ".join(filter(None, [f"equals {equal}" if equal else "", "" if is_usual else f"against {baseline}"]))


def _row(each: ReportCell, outcome: str, reason: str, remark: str) -> list[TableEntry]:
    summary = each.summary
    if summary is None:
        return [cell(each.name, each.name), *[cell("") for _ in COLUMNS[2:]], _state(each)]
    up, drop = summary.speed_up.smaller, summary.paired.drop_points
    cost = summary.cost
    whole = cost.row_layers + cost.row_layers_reused
    is_base, (low, high) = summary.is_baseline, summary.accuracy_interval
    return [
        cell(each.name, each.name, small=remark),
        number(summary.accuracy, ".1f", factor=100, suffix=" %", small=interval(low, high, ".1f", factor=100)),
        cell("–") if is_base else number(drop.value, "+.1f", small=interval(drop.low, drop.high, "+.1f")),
        number(summary.throughput.tokens, ",.0f"),
        rate_entry(summary, ".0f"),
        cell("1.00×", 1.0) if is_base else number(up.value, ".2f", suffix="×", small=interval(up.low, up.high, ".2f")),
        number(summary.predicted, ".2f", suffix="×"),
        number(cost.forwards, ",.0f"),
        number(cost.row_layers, ",.0f"),
        number(cost.row_layers_reused / whole if whole else None, ".0f", factor=100, suffix=" %"),
        cell(outcome, outcome, small=reason, tone=TONES.get(outcome, "")),
    ]


def rate_entry(summary: Summary, form: str) -> TableEntry:
    """Returns tokens per second as the median over chunks; a dash if no timing can be compared."""
    rate = summary.rate
    return number(None, form) if rate is None else number(rate.value, form, small=interval(rate.low, rate.high, form))


def _state(each: ReportCell) -> TableEntry:
    return cell(each.state, each.state, small=each.note, tone=TONES.get(each.state, "open"))


def comparison_table(task: ReportTask, other: ReportTask, other_name: str) -> Block:
    """Returns configs of the same name side by side; those that only one side has stand alone."""
    here, there = ({each.name: each.summary for each in side.done} for side in (task, other))
    rows = []
    for name in dict.fromkeys([*here, *there]):
        one, two = here.get(name), there.get(name)
        accuracy, rate = (_both(one, two, pick) for pick in (_accuracy, _rate))
        change = accuracy[1] - accuracy[0] if None not in accuracy else None  # type: ignore[operator]
        ratio = rate[1] / rate[0] if None not in rate else None  # type: ignore[operator]
        rows.append(
            [
                cell(name, name),
                *(number(each, ".1f", factor=100, suffix=" %") for each in accuracy),
                number(change, "+.1f", factor=100),
                *(number(each, ".0f") for each in rate),
                number(ratio, ".2f", suffix="×"),
            ]
        )
    mine, theirs = task.experiment.name, other_name
    columns = (
        "config",
        f"accuracy, {mine}",
        f"accuracy, {theirs}",
        "points",
        f"tokens/s, {mine}",
        f"tokens/s, {theirs}",
    )
    caption = "Runs of different sessions or machines: accuracies can be compared, rates only with care."
    return table("Side by side", (*columns, "ratio"), rows, caption=caption, name="compare")


def _both(one: Any, two: Any, pick: Any) -> list[float | None]:
    return [None if each is None else pick(each) for each in (one, two)]


def _accuracy(summary: Summary) -> float:
    return summary.accuracy


def _rate(summary: Summary) -> float | None:
    rate = summary.rate
    return rate.value if rate else None


def _findings(task: ReportTask) -> Block:
    items: list[tuple[str, str]] = [(each.level, each.message) for each in task.findings]
    items += [(each.state, f"{each.name}: {each.note}") for each in task.unfinished]
    nothing = "The audit found nothing to remark on."
    if task.source == "artifacts":
        items.insert(0, ("remark", "Shown from the summaries in artifacts/: an audit needs the samples in results/."))
    return notes("What the audit found", items, nothing=nothing, name="audit")


def provenance_blocks(task: ReportTask) -> list[Block]:
    """Returns what all configs share, and what each has of its own."""
    if not task.done:
        return []
    first = task.summaries[0]
    identity, environment, git = first.identity, first.environment or {}, first.git or {}
    commit = (
        f"{git['commit']}{', src/ changed since' if git.get('dirty') else ''}" if git.get("commit") else "no git here"
    )
    items = [
        ("model", _model(task, first)),
        ("code", f"hash {identity.source or '?'}, commit {commit}"),
        ("device", f"{first.gpu_info or identity.device or '?'}, {environment.get('machine', '?')}"),
        ("machine", _listed(first.machine or {}) or "not recorded"),
        ("versions", ", ".join(f"{name} {value}" for name, value in environment.items() if name != "machine")),
        ("decoding", _listed(identity.decoding.as_json())),
        ("policy", identity.decoder),
        (
            "evaluation",
            _listed(first.eval_params | {"metric": first.accuracy_metric, "samples": first.samples}),
        ),
        ("estimator of log-likelihoods", identity.estimator or "?"),
        ("peak memory", f"{first.peak_memory_bytes / 2**20:,.0f} MiB"),
        (
            "loading, warm-up",
            f"{first.throughput.loading_seconds:.1f} s, {first.throughput.warm_up_seconds:.1f} s, not counted",
        ),
    ]
    rows = [
        [
            cell(each.config, each.config),
            cell(", ".join(each.identity.rules) or "no reuse"),
            cell(each.identity.decoder),
            cell(each.run_id, each.run_id),
            cell(each.timestamp, each.timestamp),
        ]
        for each in task.summaries
    ]
    columns = ("config", "rules", "policy", "run", "finished")
    return [facts("Where this comes from", items, name="provenance"), table("Runs", columns, rows, name="runs")]


def _model(task: ReportTask, summary: Summary) -> str:
    arguments, identity = summary.model_args, summary.identity
    revision = f", revision {arguments.revision}" if arguments.revision else ""
    return f"{task.model}{revision}, {arguments.dtype}, hash {identity.model or '?'}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plainly(value)}" for name, value in values.items())


def _plainly(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
