"""Result tables for the terminal and for Markdown."""

from typing import Any

from stepsaver.bench.verdict import Verdict, smaller_speed_up

COLUMNS = ("config", "accuracy", "drop", "tokens/s", "speed-up", "predicted", "ceiling", "reused", "verdict")


def result_rows(summaries: list[dict[str, Any]], verdict: Verdict) -> list[tuple[str, ...]]:
    outcomes = {each.config: each.outcome for each in verdict.configs}
    return [_row(summary, outcomes.get(summary["config"], "baseline")) for summary in summaries]


def _row(summary: dict[str, Any], outcome: str) -> tuple[str, ...]:
    low, high = summary["accuracy_interval"]
    up = smaller_speed_up(summary)
    drop = summary["paired"]["drop_points"]
    cost = summary["cost"]
    reused = cost["row_layers_reused"] / max(cost["row_layers"] + cost["row_layers_reused"], 1)
    return (
        summary["config"],
        f"{summary['accuracy']:.1%} [{low:.1%}, {high:.1%}]",
        f"{drop[0]:+.1f} [{drop[1]:+.1f}, {drop[2]:+.1f}]",
        _number(summary["throughput"]["tokens_per_s"], ".0f"),
        f"{up.value:.2f} [{up.low:.2f}, {up.high:.2f}]",
        _number(summary["predicted_speed_up"], ".2f"),
        _number(summary["ceiling"], ".2f"),
        f"{reused:.0%}",
        outcome,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plain_table(rows: list[tuple[str, ...]], columns: tuple[str, ...] = COLUMNS) -> str:
    widths = [max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(rows: list[tuple[str, ...]], columns: tuple[str, ...] = COLUMNS) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
