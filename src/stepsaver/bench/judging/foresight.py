"""From the counted steps of stored runs to what the same steps would take elsewhere. Nothing of it is measured.

Samples are independent of their batch, so the steps that a config took are those that it takes in any batch. A forward
of another batch is put together from as many of them, drawn at random with a fixed seed, and costs what `RowCosts`,
measured or made from a data sheet, say of its rows.
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
from stepsaver.engine.row_costs import RowCosts, predicted_seconds
from stepsaver.engine.trace import ForwardRecord, LayersRun, SampleStep

MOST = 1 << 40
FORWARDS = 400  # that are drawn for each config, device and batch
USUAL_CONTEXT = 128  # rows, where a summary does not say: it matters little, keys and values are few beside weights
READ_SHARE = 0.25  # of a step's rows whose logits are read, where a summary does not say


class CountedStep(NamedTuple):
    number: int
    step: SampleStep


@dataclass(frozen=True)
class CountedRun:
    """All steps of a config on a task, and what came of them."""

    tokens: int
    forwards: int
    sample_forwards: int | None  # summed over samples, prefills aside; None: nobody counted, so steps are not joined
    layers: int  # of the model that took them
    steps: tuple[CountedStep, ...]
    rules: int = 0  # that planned them

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
        """Of all samples, on the average, as the batch was filled."""
        return self._taken / max(self.forwards, 1)

    @property
    def steps_per_sample(self) -> float:
        """That a sample takes in one forward: more than one where steps are joined."""
        return self._taken / self.sample_forwards if self.sample_forwards else 1.0


def read_counted_run(summary: Summary, folder: Path) -> CountedRun:
    """Of a config, from its summary; older ones leave the steps to the trace beside them, and to averages by kind."""
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
        rules=len(summary.identity.rules),
    )


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
    """A step of each kind with the mean of its rows. After the last layer only the rows that are read go on."""
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
    """Seconds per token, where a forward holds `batch` steps on the average."""
    random = np.random.default_rng(seed)
    planned = replace(costs, sample=costs.sample + run.rules * costs.rule)
    seconds = _seconds(run.decoding_steps, run.layers, planned, batch, random)
    if run.prefills:
        rows = np.average([each.step.rows for each in run.prefills], weights=[each.number for each in run.prefills])
        together = max(min(batch, PREFILL_ROWS / max(float(rows), 1.0)), 1.0)
        seconds += _seconds(run.prefills, run.layers, costs, together, random)
    return seconds / run.tokens


def _seconds(
    steps: list[CountedStep], layers: int, costs: RowCosts, batch: float, random: np.random.Generator
) -> float:
    """Of all steps, `batch` of them in a forward: the mean of forwards that are drawn, as often as there are any."""
    steps = [each for each in steps if each.number]
    total = sum(each.number for each in steps)
    if not total:
        return 0.0
    shares = np.array([each.number for each in steps]) / total
    scaled = [_in_layers(each.step, layers, costs.layers) for each in steps]
    sizes = np.floor(batch + random.random(FORWARDS)).astype(int)  # whole numbers with the wanted mean
    drawn = [
        predicted_seconds(costs, _record([scaled[index] for index in random.choice(len(steps), size, p=shares)], costs))
        for size in np.maximum(sizes, 1)
    ]
    return float(np.mean(drawn)) * total / max(batch, 1.0)


def _in_layers(step: SampleStep, layers: int, wanted: int) -> SampleStep:
    """The step in a model of another depth: as many of its rows run in each layer."""
    if layers == wanted:
        return step
    return step._replace(
        attention_run=round(step.attention_run * wanted / layers),
        keys_values_run=round(step.keys_values_run * wanted / layers),
        mlp_run=round(step.mlp_run * wanted / layers),
    )


def _record(steps: list[SampleStep], costs: RowCosts) -> ForwardRecord:
    """A forward of some steps, each of a sample of its own. A layer is taken to run if any row of any runs there."""
    entries = tuple(step._replace(sample=index) for index, step in enumerate(steps))
    runs = (sum(getattr(e, name) for e in entries) for name in ("attention_run", "keys_values_run", "mlp_run"))
    return ForwardRecord(0.0, 0.0, LayersRun(*(min(costs.layers, count) for count in runs)), entries, 0)
