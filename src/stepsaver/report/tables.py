"""The tables of a task, for the terminal, for Markdown, for the page and as CSV."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isnan
from typing import Any

from stepsaver.bench.documents import Summary, TimedAgain
from stepsaver.bench.experiment import ConfigSpec, Criterion
from stepsaver.bench.statistics import holm, most_configs, paired
from stepsaver.bench.timings import chunk_pairs, compare_speeds
from stepsaver.bench.verdict import Verdict
from stepsaver.engine.errors import UsageError
from stepsaver.report.blocks import (
    TERMINAL,
    Block,
    Row,
    TableEntry,
    bare,
    cell,
    estimate,
    named,
    number,
    plain_table,
    table,
    text_rows,
)
from stepsaver.report.cells import ReportCell, ReportTask

COLUMNS = (
    "config", "verdict", "right", "drop in points", "speed-up", "over AR", "predicted", "tokens/s", "tokens",
    "forwards", "left out",
)  # fmt: skip
NARROW = 6  # of these columns fit a terminal
CAPTION = (
    "Decisions use 95 % confidence intervals. The speed-up is the smaller one of tokens per second and seconds per "
    "sample, measured beside the config's baseline on the same chunks: a mean of log ratios, with chunks and sessions "
    "as crossed random effects; tokens/s is the median over these chunks. Over AR: likewise, over autoregressive "
    "decoding by the same engine, a reference that is not judged. A control does exactly the baseline's work. "
    "Predicted: what the executed operations would give. Left out: the share of the baseline's positions in all "
    "layers that were not computed."
)
DROP_BY = {
    "score": "The drop's interval is Tango's, of paired shares.",
    "t": "The drop's interval is Student's, of paired differences: the metric is not only 0 or 1.",
}
MANY = 1000  # configs: more than any experiment has
TONES = {"confirmed": "good", "rejected": "bad", "running": "open", "failed": "bad", "incomplete": "open"}
HEADINGS = {"k": "Reuse K", "layers": "Layer Subset"}  # what the source's complete results table calls a rule's fields


def what_it_does(config: ConfigSpec) -> str:
    """Returns a config's decoder, rules and policy, as far as it has its own."""
    return ", ".join(config.settings) or "no reuse"


def result_rows(
    summaries: Sequence[Summary], verdict: Verdict, configs: Mapping[str, ConfigSpec] | None = None
) -> list[Row]:
    """Returns a row per config, with entries for all columns; what the configs do stands under their names."""
    outcomes = {each.config: each for each in verdict.configs}
    by_name = {each.config: each for each in summaries}
    first = next((each.config for each in summaries if each.is_baseline), None)
    rows: list[Row] = []
    for one in summaries:
        judged, baseline = outcomes.get(one.config), by_name.get(one.baseline)
        does = [what_it_does(configs[one.config])] if configs else []
        does += [f"equals {one.equal_to}"] if one.equal_to else []
        does += [] if one.is_baseline or one.baseline == first else [f"against {one.baseline}"]
        whole = baseline.cost.row_layers if baseline else 0
        rows.append(
            [
                named(one.config, small="; ".join(does)),
                named(judged.outcome, small=judged.reason, tone=TONES.get(judged.outcome, ""))
                if judged
                else named(unjudged(one)),
                estimate((one.accuracy, *one.accuracy_interval), ".1f", factor=100, suffix=" %"),
                cell("-") if one.is_baseline else estimate(one.paired.drop_points, ".1f"),
                cell("1.00x", 1.0) if one.is_baseline else estimate(one.speed_up.smaller, ".2f", suffix="x"),
                _over_reference(one),
                number(None if one.is_baseline else one.predicted, ".2f", suffix="x"),
                estimate(one.rate, ",.0f") if one.rate else cell("-"),
                number(one.throughput.tokens, ",.0f"),
                number(one.cost.forwards, ",.0f"),
                number(1 - one.cost.row_layers / whole if whole else None, ".0f", factor=100, suffix=" %"),
            ]
        )
    return rows


def unjudged(summary: Summary) -> str:
    """Returns what stands in the place of an outcome."""
    return "reference" if summary.is_reference else "baseline"


def _over_reference(one: Summary) -> TableEntry:
    over = one.over_reference.smaller if one.over_reference else None
    return cell("-") if one.is_reference or over is None else estimate(over, ".2f", suffix="x")


def result_caption(summaries: Sequence[Summary], wanted: Criterion) -> str:
    """Returns how the table's figures came about, and what a run of its size can decide."""
    tests, sessions = {each.paired.test for each in summaries}, max(each.sessions for each in summaries)
    said = [CAPTION, *(text for test, text in DROP_BY.items() if test in tests)]
    if sessions > 1:
        said.append(f"Timed in {sessions} sessions.")
    else:
        said.append("Timed in one session: what differs between sessions is in no interval.")
    samples, bound = summaries[0].samples, wanted.drop_points
    if bound.sign == "<" and 0 < bound.bound < 100:
        most = most_configs(samples, bound.bound / 100)
        among = f"among at most {most:.0f} configs" if most < MANY else "however many configs there are"
        can = f"can show a drop {bound} points {among}, by Holm's correction" if most else "cannot decide this bound"
        said.append(f"A run of {samples:,} samples {can}.")
    return " ".join(said)


def result_text(summaries: Sequence[Summary], verdict: Verdict, *, is_wide: bool = False) -> str:
    """Returns the table for a terminal: within 80 columns, or everything."""
    rows = result_rows(summaries, verdict)
    if is_wide:
        return plain_table(text_rows(rows), COLUMNS)
    short = [[*bare(row[:3]), *row[3 : NARROW - 1], *bare(row[NARROW - 1 : NARROW])] for row in rows]
    return plain_table(text_rows(short), COLUMNS[:NARROW], width=TERMINAL)


def result_table(task: ReportTask) -> Block:
    """Returns the table of a page: what is done, and where the other configs stand."""
    configs = {each.name: each.config for each in task.cells}
    found = result_rows(task.summaries, task.verdict(), configs) if task.done else []
    done = {row[0]["text"]: row for row in found}
    rows = [done.get(each.name) or _unfinished(each) for each in task.cells]
    caption = result_caption(task.summaries, task.experiment.spec.success.confirm_if) if task.done else CAPTION
    return table("Results", COLUMNS, rows, caption=caption, name="results")


def _unfinished(each: ReportCell) -> Row:
    state = named(each.state, small=each.note, tone=TONES.get(each.state, "open"))
    return [named(each.name, small=what_it_does(each.config)), state, *[cell("")] * (len(COLUMNS) - 2)]


def against_table(task: ReportTask, name: str) -> Block:
    """Returns every other config beside one: a paired test of each two, whatever they are judged against."""
    cells = {each.name: each for each in task.done if each.timings}
    if name not in cells:
        raise UsageError(f"{task.folder} has no results of {name} here to compare with: timings are not in artifacts")
    base, others = cells.pop(name), cells
    faster = compare_speeds({each: chunk_pairs(cell.timings, base.timings) for each, cell in others.items()})
    p_values: dict[str, float] = {}
    found = {}
    for each, cell_ in others.items():
        keys = sorted(cell_.scores.keys() & base.scores.keys())
        scores = paired([base.scores[key] for key in keys], [cell_.scores[key] for key in keys])
        up, drop = faster[each].stored().smaller, scores.drop()
        found[each] = up, drop.scaled(100)
        p_values[f"{each} speed"] = faster[each].p_value(1.0, above=up.value > 1)
        p_values[f"{each} drop"] = scores.p_value(0.0, above=drop.value > 0)
    standing = holm(p_values)
    rows = []
    for each, (up, drop) in found.items():
        surely = [("faster" if up.value > 1 else "slower")] if f"{each} speed" in standing else []
        surely += [("worse" if drop.value > 0 else "better")] if f"{each} drop" in standing else []
        both = estimate(up, ".2f", suffix="x"), estimate(drop, ".1f")
        rows.append([named(each), *both, cell(" and ".join(surely) or "undecided")])
    columns = ("config", f"speed-up over {name}", "drop in points", "after Holm's correction")
    return table(f"Against {name}", columns, rows, caption="Decisions use 95 % confidence intervals.", name="against")


def as_latex(tasks: Sequence[ReportTask]) -> str:
    """Returns the results as a table for booktabs for each task."""
    parts = []
    for task in tasks:
        rows = [[*bare(row[:2]), *row[2:]] for row in result_rows(task.summaries, task.verdict())]
        lines = [tuple(COLUMNS), *text_rows(rows)]
        head, *body = (" & ".join(map(_latex, line)) + r" \\" for line in lines)
        columns = "ll" + "r" * (len(COLUMNS) - 2)
        parts += [
            f"% {task.experiment.name}, {task.folder}, {task.summaries[0].samples} samples",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", "",
        ]  # fmt: skip
    return "\n".join(parts)


def _latex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def compared_settings(task: ReportTask) -> dict[str, dict[str, str]]:
    """Returns, by config, the fields of its one rule that tell the configs of a task apart, and their values.

    Empty if configs differ in more than that: in several rules, rules of different kinds, or policies.
    """
    rules = {cell.name: cell.config.parsed_rules() for cell in task.cells}
    kinds: set[Any] = {type(rule) for each in rules.values() for rule in each}  # dataclasses, all of them
    others = any(cell.config.policy or cell.config.decode for cell in task.cells)
    if len(kinds) != 1 or any(len(each) != 1 for each in rules.values()) or others:
        return {}
    values = {field.name: [getattr(rule, field.name) for (rule,) in rules.values()] for field in fields(kinds.pop())}
    varied = [name for name, each in values.items() if len(set(each)) > 1]
    return {config: {name: str(values[name][index]) for name in varied} for index, config in enumerate(rules)}


def complete_table(task: ReportTask) -> Block:
    """Returns the source's complete results table, with `Rules` if no rule's fields tell the configs apart."""
    settings = compared_settings(task)
    what = [HEADINGS.get(name, name) for name in next(iter(settings.values()), {})] or ["Rules"]
    columns = ("Config", *what, "Accuracy", "Throughput (tokens/s)", "Total Tokens", "Total Time (h)", "Notes")
    outcomes = {each.config: f"{each.outcome}: {each.reason}" for each in task.verdict().configs}
    rows = []
    for one in task.summaries:
        rules = what_it_does(task.experiment.config(one.config))
        rows.append(
            [
                cell(one.config),
                *map(cell, settings.get(one.config, {}).values() or [rules]),
                number(one.accuracy, ".2f", factor=100, suffix=" %"),
                estimate(one.rate, ".2f") if one.rate else cell("-"),
                number(one.throughput.tokens, ",.0f"),
                number(one.throughput.decode_seconds, ".3g", factor=1 / 3600),
                cell("; ".join(_notes(task, one, outcomes.get(one.config, unjudged(one).capitalize())))),
            ]
        )
    return table("Complete Results Table", columns, rows, name="complete")


def _notes(task: ReportTask, one: Summary, outcome: str) -> list[str]:
    found = [outcome, *([f"equal to {one.equal_to}"] if one.equal_to else [])]
    found += [
        f"{finding.level}: {finding.message}"
        for finding in task.findings
        if finding.check == "rates" and finding.message.startswith(f"{one.config} ")
    ]
    return found + [timed_again(each) for each in one.timed_again]


def timed_again(repeat: TimedAgain) -> str:
    """Says which of two timings of a chunk counts."""
    seconds, before = repeat.seconds, repeat.seconds_before
    return f"chunk {repeat.chunk} was timed again: {seconds:.2f} s count, not {before:.2f} s"


def as_csv(tasks: Sequence[ReportTask]) -> str:
    """Returns a row per task and config, numbers as they are stored."""
    stream, estimates = io.StringIO(), ("accuracy", "drop_points", "speed_up", "over_reference", "tokens_per_s")
    writer = csv.writer(stream)
    bounds = [f"{name}{bound}" for name in estimates for bound in ("", "_low", "_high")]
    writer.writerow(("experiment", "task", "config", "verdict", "samples", *bounds, "predicted", "forwards"))
    for task in tasks:
        outcomes = {each.config: each.outcome for each in task.verdict().configs}
        for one in task.summaries:
            found = (one.accuracy, *one.accuracy_interval), one.paired.drop_points, one.speed_up.smaller
            over = one.over_reference.smaller if one.over_reference else ("", "", "")
            numbers = [*found[0], *found[1], *found[2], *over, *(one.rate or ("", "", ""))]
            shown = ["" if isinstance(each, float) and isnan(each) else each for each in numbers]
            start = (
                task.experiment.name,
                task.folder,
                one.config,
                outcomes.get(one.config, unjudged(one)),
                one.samples,
            )
            writer.writerow((*start, *shown, one.predicted, one.cost.forwards))
    return stream.getvalue()
