"""Projects the counted steps of stored runs onto other devices and batch sizes. None of it is measured.

Samples are independent of their batch, so a config takes the same steps in any batch. A forward of another batch size
is put together from as many of its steps, drawn at random with a fixed seed. What its rows cost comes from `RowCosts`,
which are measured or made from a data sheet.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast, get_args

import numpy as np

from stepsaver.bench.results.store import read_cell_files
from stepsaver.bench.results.summary import Summary
from stepsaver.bench.results.timing import Kinds
from stepsaver.bench.running.step_counts import FIELDS, StepCounts, merge_counts
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.plan import Kind
from stepsaver.engine.prefill import PREFILL_ROWS
from stepsaver.engine.row_costs import NO_RULES, Planning, RowCosts, planning_of, predicted_seconds
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import ForwardRecord, LayersRun, SampleStep

MOST = 1 << 40
FORWARDS = 400  # drawn for each config, device and batch size
USUAL_CONTEXT = 128  # rows, if a summary does not say; it matters little, since keys and values are few beside weights
READ_SHARE = 0.25  # of a step's rows whose logits are read, if a summary does not say


class CountedStep(NamedTuple):
    """A step, and how often it was taken."""

    number: int
    step: SampleStep


@dataclass(frozen=True)
class CountedRun:
    """All steps that a config took on a task, with the tokens and forwards that they came to."""

    tokens: int
    forwards: int
    sample_forwards: int | None  # summed over samples, without prefills; None: not counted, so taken as one per step
    layers: int  # of the model that took the steps
    steps: tuple[CountedStep, ...]
    planning: Planning = NO_RULES
    joins_prefills: bool = False  # a context runs beside the steps of other samples

    @property
    def decoding_steps(self) -> list[CountedStep]:
        return [each for each in self.steps if each.step.kind != "prefill"]

    @property
    def prefills(self) -> list[CountedStep]:
        return [each for each in self.steps if each.step.kind == "prefill"]

    @property
    def _taken(self) -> int:
        return sum(each.number for each in self.decoding_steps if each.step.rows)

    @property
    def steps_per_forward(self) -> float:
        """The mean over all forwards, all samples together, with the batch as full as it was."""
        return self._taken / max(self.forwards, 1)

    @property
    def prefills_per_forward(self) -> float:
        return sum(each.number for each in self.prefills) / max(self.forwards, 1)

    @property
    def steps_per_sample(self) -> float:
        """The mean that a sample takes in one forward: more than one if steps are joined."""
        return self._taken / self.sample_forwards if self.sample_forwards else 1.0


def read_counted_run(summary: Summary, folder: Path) -> CountedRun:
    """Reads a config's steps from its summary; if that is too old to have them, from the trace beside it, else as
    averages by kind.
    """
    counts: StepCounts | None = summary.steps
    if counts is None:
        timings = read_cell_files(folder, summary.run_id).own_timings if folder.is_dir() else []
        try:
            counts = merge_counts(each.steps for each in timings)
        except (IndexError, TypeError, ValueError):
            raise UsageError(f"{folder}: the counted steps of its trace cannot be read") from None
    layers = summary.identity.layers
    return CountedRun(
        tokens=round(summary.throughput.tokens),
        forwards=round(summary.cost.forwards),
        sample_forwards=summary.sample_forwards,
        layers=layers,
        steps=_steps(counts) if counts else _average_steps(summary.cost.by_kind, layers),
        planning=_planning(summary),
        joins_prefills=_joins_prefills(summary),
    )


def _planning(summary: Summary) -> Planning:
    texts = summary.identity.rules
    try:
        return planning_of([parse_rule(text) for text in texts], summary.identity.layers)
    except UsageError:  # of a package that is not here: it may keep deltas
        return Planning(len(texts), keeps_deltas=True)


def _joins_prefills(summary: Summary) -> bool:
    """Whether prefills share a forward with steps, as the engine decides it: not if a rule keeps deltas."""
    decoding = summary.identity.decoding
    is_joined = decoding.prefix_cache and decoding.join not in ("none", "commit")
    return is_joined and not _planning(summary).keeps_deltas


def _steps(counts: StepCounts) -> tuple[CountedStep, ...]:
    found = []
    for number, context, *fields in counts:
        values = dict(zip(FIELDS, fields, strict=False))
        numbers = [number, context, *(value for name, value in values.items() if name not in ("kind", "first_row"))]
        whole = all(isinstance(each, int) and 0 <= each < MOST for each in numbers)
        if not whole or not number or values.keys() != set(FIELDS) or values["kind"] not in get_args(Kind):
            raise UsageError(f"counted steps that cannot be: {shown([number, context, *fields])}")
        step = SampleStep(sample=0, context=round(context / number), revealed=0, **values)
        found.append(CountedStep(number, step))
    return tuple(found)


def _average_steps(by_kind: Kinds, layers: int) -> tuple[CountedStep, ...]:
    """Returns one step per kind, with its mean number of rows. In the last layer only the rows that are read run."""
    found = []
    for kind, figures in by_kind.items():
        number = round(figures["steps"])
        rows = round(figures["row_layers"] / max(number, 1) / (layers - 1 + READ_SHARE))
        run = round(figures["row_layers"] / max(number, 1))
        read = 0 if kind == "prefill" else max(round(READ_SHARE * rows), 1) if rows else 0
        values = dict.fromkeys(("attention_run", "keys_values_run", "mlp_run"), run)
        values |= dict.fromkeys(("step", "step_in_sub_block", "revealed", "attention_reused", "mlp_reused"), 0)
        step = SampleStep(
            sample=0,
            kind=cast(Kind, kind),
            rows=rows,
            first_row=None,
            context=USUAL_CONTEXT + rows,
            head_rows=read,
            **values,
        )
        found.append(CountedStep(number, step))
    return tuple(found)


def foreseen_seconds(run: CountedRun, costs: RowCosts, batch: float, *, seed: int = 0) -> float:
    """Returns the seconds per token if a forward holds `batch` steps on average."""
    random = np.random.default_rng(seed)
    planning = costs.planned_sample(run.planning) / max(run.steps_per_sample, 1.0)  # once for all of a sample's
    planned = replace(costs, sample=planning)
    steps, prefills = run.decoding_steps, run.prefills
    if run.joins_prefills and any(each.number > 0 for each in steps):
        return _seconds(run, steps, planned, batch, random, beside=prefills) / run.tokens
    seconds = _seconds(run, steps, planned, batch, random)
    if prefills:
        rows = np.average([each.step.rows for each in prefills], weights=[each.number for each in prefills])
        together = min(batch or run.prefills_per_forward, PREFILL_ROWS / max(float(rows), 1.0))
        seconds += _seconds(run, prefills, costs, max(together, 1.0), random)
    return seconds / run.tokens


def _seconds(
    run: CountedRun,
    steps: list[CountedStep],
    costs: RowCosts,
    batch: float,
    random: np.random.Generator,
    *,
    beside: list[CountedStep] | None = None,
) -> float:
    """Returns the seconds of all steps, with `batch` of them in a forward and the steps `beside` spread evenly: the
    mean of drawn forwards, times the number of forwards.
    """
    total = sum(each.number for each in steps)
    if not total:
        return 0.0
    forwards = total / max(batch, 1.0)
    seconds = []
    for _ in range(FORWARDS):
        drawn = _drawn(run, steps, max(int(batch + random.random()), 1), costs, random)
        if beside:
            share = sum(each.number for each in beside) / forwards
            drawn += _drawn(run, beside, int(share + random.random()), costs, random)
        seconds.append(predicted_seconds(costs, _record(drawn, costs)))
    return float(np.mean(seconds)) * forwards


def _drawn(
    run: CountedRun, steps: list[CountedStep], size: int, costs: RowCosts, random: np.random.Generator
) -> list[SampleStep]:
    """Returns that many steps drawn at random, each as often as it was taken."""
    numbers = np.array([each.number for each in steps])
    chosen = random.choice(len(steps), size, p=numbers / numbers.sum())
    return [_in_layers(steps[index].step, run.layers, costs.layers) for index in chosen]


def _in_layers(step: SampleStep, layers: int, wanted: int) -> SampleStep:
    """Returns the step in a model of another depth, with as many of its rows in each layer."""
    if layers == wanted:
        return step
    return step._replace(
        attention_run=round(step.attention_run * wanted / layers),
        keys_values_run=round(step.keys_values_run * wanted / layers),
        mlp_run=round(step.mlp_run * wanted / layers),
    )


def _record(steps: list[SampleStep], costs: RowCosts) -> ForwardRecord:
    """Returns a forward of some steps, each of another sample. A layer counts as run if any row of a step is in it."""
    entries = tuple(step._replace(sample=index) for index, step in enumerate(steps))
    runs = (sum(getattr(e, name) for e in entries) for name in ("attention_run", "keys_values_run", "mlp_run"))
    return ForwardRecord(0.0, 0.0, LayersRun(*(min(costs.layers, count) for count in runs)), entries, 0)
