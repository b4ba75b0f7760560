"""Result tables for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import fields
from math import isnan
from typing import Any

from stepsaver.bench.documents import Summary, TimedAgain
from stepsaver.bench.verdict import Verdict
from stepsaver.report.cells import ReportCell, ReportTask

COLUMNS = (
    "config", "accuracy", "drop", "tokens/s", "speed-up", "predicted", "left out", "verdict",
)  # fmt: skip
HEADINGS = {"k": "Reuse K", "layers": "Layer Subset"}  # what the source's complete results table calls a rule's fields


def result_rows(summaries: list[Summary], verdict: Verdict) -> list[tuple[str, ...]]:
    """Returns a row per config. `left out` is the share of its baseline's row-layers that were not computed."""
    outcomes = {each.config: each.outcome for each in verdict.configs}
    whole = {each.config: each.cost.row_layers for each in summaries if each.is_baseline}
    first = next(iter(whole), None)
    rows = []
    for summary in summaries:
        baseline = summary.baseline
        outcome = outcomes.get(summary.config, "baseline")
        against = "" if summary.is_baseline or baseline == first else f", against {baseline}"
        rows.append(_row(summary, outcome + against, whole.get(baseline, 0)))
    return rows


def _row(summary: Summary, outcome: str, whole: float) -> tuple[str, ...]:
    low, high = summary.accuracy_interval
    up = summary.speed_up.smaller
    drop = summary.paired.drop_points
    return (
        summary.config,
        f"{summary.accuracy:.1%} [{low:.1%}, {high:.1%}]",
        f"{drop[0]:+.1f} [{drop[1]:+.1f}, {drop[2]:+.1f}]",
        rate_text(summary, ".0f"),
        "-" if isnan(up.value) else f"{up.value:.2f} [{up.low:.2f}, {up.high:.2f}]",
        or_dash(summary.predicted, ".2f"),
        f"{1 - summary.cost.row_layers / whole:.0%}" if whole else "-",
        outcome,
    )


def rate_text(summary: Summary, form: str) -> str:
    """Returns tokens per second as the median over chunks, with its interval."""
    rate = summary.rate
    return "-" if rate is None else f"{rate.value:{form}} [{rate.low:{form}}, {rate.high:{form}}]"


def or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plain_table(rows: list[tuple[str, ...]], columns: tuple[str, ...] = COLUMNS) -> str:
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(rows: Sequence[tuple[str, ...]], columns: tuple[str, ...] = COLUMNS) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def compared_settings(task: ReportTask) -> dict[str, dict[str, str]]:
    """Returns, by config, the fields of its one rule that tell the configs of a task apart, and their values.

    Empty if configs differ in more than that: in several rules, rules of different kinds, or policies.
    """
    rules = {cell.name: cell.config.parsed_rules() for cell in task.cells}
    kinds: set[Any] = {type(rule) for each in rules.values() for rule in each}  # dataclasses, all of them
    if (
        len(kinds) != 1
        or any(len(each) != 1 for each in rules.values())
        or any(c.config.policy or c.config.decode for c in task.cells)
    ):
        return {}
    values = {field.name: [getattr(rule, field.name) for (rule,) in rules.values()] for field in fields(kinds.pop())}
    varied = [name for name, each in values.items() if len(set(each)) > 1]
    return {config: {name: str(values[name][index]) for name in varied} for index, config in enumerate(rules)}


def complete_columns(task: ReportTask) -> tuple[str, ...]:
    """Returns those of the source's complete results table, with `Rules` if no rule's fields tell the configs apart."""
    settings = next(iter(compared_settings(task).values()), {})
    what = [HEADINGS.get(name, name) for name in settings] or ["Rules"]
    return ("Config", *what, "Accuracy", "Throughput (tokens/s)", "Total Tokens", "Total Time (h)", "Notes")


def complete_rows(task: ReportTask) -> list[tuple[str, ...]]:
    """Returns a row per config that is done."""
    outcomes = {each.config: f"{each.outcome}: {each.reason}" for each in task.verdict().configs}
    return [_complete_row(task, cell, outcomes) for cell in task.done]


def timed_again(repeat: TimedAgain) -> str:
    """Says which of two timings of a chunk counts."""
    seconds, before = repeat.seconds, repeat.seconds_before
    return f"chunk {repeat.chunk} was timed again: {seconds:.2f} s count, not {before:.2f} s"


def _complete_row(task: ReportTask, cell: ReportCell, outcomes: dict[str, str]) -> tuple[str, ...]:
    summary = cell.summary
    assert summary is not None, "what is done has a summary"
    rules = ", ".join(cell.config.settings) or "no reuse"
    what = tuple(compared_settings(task).get(cell.name, {}).values()) or (rules,)
    notes = ["Baseline"] if summary.is_baseline else [outcomes[cell.name]]
    if summary.equal_to:
        notes.append(f"equal to {summary.equal_to}")
    notes += [
        f"{finding.level}: {finding.message}"
        for finding in task.findings
        if finding.check == "rates" and finding.message.startswith(f"{cell.name} ")
    ]
    notes += [timed_again(each) for each in summary.timed_again]
    return (
        cell.name,
        *what,
        f"{summary.accuracy:.2%}",
        rate_text(summary, ".2f"),
        f"{summary.throughput.tokens:,.0f}",
        f"{summary.throughput.decode_seconds / 3600:.3g}",
        "; ".join(notes),
    )
