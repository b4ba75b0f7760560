"""What one sample's next step computes. A plan is the only way to leave work out.

For every layer, a plan names the rows whose attention runs, the rows whose keys and values are rewritten, and the rows
whose MLP runs. If a part does not run for a row of the window, the row takes that part's delta from the delta cache. In
the last layer, only the rows that are read go on after the keys and values. `base_plan.py` has the plans without rules.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from stepsaver.engine.prediction import NEXT, Prediction
from stepsaver.engine.rows import NO_ROWS, Rows, describe, is_subset

Kind = Literal["prefill", "full", "sub", "commit", "reused", "draft", "verify"]


class LayerRows(NamedTuple):
    """The rows that run in one layer, per kind of work."""

    attention: Rows
    keys_values: Rows
    mlp: Rows


class LayerRun(NamedTuple):
    """Consecutive layers, first to last - 1, that run the same rows."""

    first: int
    last: int
    rows: LayerRows

    @property
    def length(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class StepPlan:
    kind: Kind
    window: Rows  # the rows that carry a hidden state through this step
    reads: Rows  # the rows whose logits are read
    layers: tuple[LayerRows, ...]
    prediction: Prediction = NEXT  # which tokens the reads predict
    hidden: Rows = NO_ROWS  # rows at the end of the block that are neither computed nor attended to
    ask_after: int | None = None  # the rules are asked again after this layer

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.window, self.reads, self.runs, self.hidden, self.ask_after))

    def __le__(self, other: "StepPlan") -> bool:
        """Whether the other plan computes everything that this plan computes."""
        return (
            is_subset(self.window, other.window)
            and is_subset(self.reads, other.reads)
            and (self.is_empty or is_subset(other.hidden, self.hidden))
            and all(
                is_subset(mine.attention, theirs.attention)
                and is_subset(mine.keys_values, theirs.keys_values)
                and is_subset(mine.mlp, theirs.mlp)
                for mine, theirs in self._layers_beside(other)
            )
        )

    def _layers_beside(self, other: "StepPlan") -> Iterable[tuple[LayerRows, LayerRows]]:
        """Pairs of layers of both plans; one pair per run if they have the same runs, as most plans do."""
        if len(self.runs) == len(other.runs) and all(
            mine.last == theirs.last for mine, theirs in zip(self.runs, other.runs, strict=True)
        ):
            return ((mine.rows, theirs.rows) for mine, theirs in zip(self.runs, other.runs, strict=True))
        return set(zip(self.layers, other.layers, strict=True))

    def __str__(self) -> str:
        if self.is_empty:
            return "reused: no forward"
        layers = "; ".join(
            f"layers {run.first}-{run.last - 1} attention {describe(run.rows.attention)}"
            f" keys {describe(run.rows.keys_values)} mlp {describe(run.rows.mlp)}"
            for run in self.runs
        )
        hidden = f"; hidden {describe(self.hidden)}" if self.hidden else ""
        return f"{self.kind}: rows {describe(self.window)}{hidden}; {layers}; head {describe(self.reads)}"

    @property
    def is_empty(self) -> bool:
        """No forward at all: the last logits stand."""
        return not self.window

    @property
    def rows(self) -> int:
        return self.window.bit_count()

    @property
    def predicted(self) -> Rows:
        """The rows whose tokens are predicted by the rows that are read, in the same order."""
        return self.prediction.predicted(self.reads)

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        return tuple(layer_runs(self.layers))

    @cached_property
    def run_everywhere(self) -> Rows:
        """The rows whose MLP runs in every layer but the last, where fewer rows go on."""
        rows = self.window
        for run in self.runs[:-1]:
            rows &= run.rows.mlp
        return rows

    @cached_property
    def rewritten(self) -> Rows:
        """The rows whose keys and values are rewritten in every layer."""
        rows = self.window
        for run in self.runs:
            rows &= run.rows.keys_values
        return rows

    @cached_property
    def rewrites_alike(self) -> bool:
        """Whether every layer rewrites the keys and values of the same rows."""
        return all(run.rows.keys_values == self.rewritten for run in self.runs)

    def carried(self, layer: int) -> Rows:
        """The rows that have a hidden state after this layer's keys and values."""
        return self.reads if layer == len(self.layers) - 1 else self.window

    @cached_property
    def attention_run(self) -> int:
        """Row-layers of attention that run."""
        return sum(run.length * run.rows.attention.bit_count() for run in self.runs)

    @cached_property
    def keys_values_run(self) -> int:
        return sum(run.length * run.rows.keys_values.bit_count() for run in self.runs)

    @cached_property
    def mlp_run(self) -> int:
        return sum(run.length * run.rows.mlp.bit_count() for run in self.runs)

    @cached_property
    def attention_reused(self) -> int:
        """Row-layers whose attention delta comes from the cache."""
        return self._row_layers_carried - self.attention_run

    @cached_property
    def mlp_reused(self) -> int:
        return self._row_layers_carried - self.mlp_run

    @property
    def _row_layers_carried(self) -> int:
        return (len(self.layers) - 1) * self.rows + self.reads.bit_count()

    def within(self, rows: Rows) -> "StepPlan":
        """The plan without the rows outside `rows`. Those keep their keys and values."""
        return self if is_subset(self.window, rows) else _within(self, self.window & rows)

    def also_reading(self, rows: Rows) -> "StepPlan":
        """The plan that also reads `rows` of its window. Only here does a plan get more work."""
        return self if is_subset(self.window & rows, self.reads) else _also_reading(self, self.window & rows)

    def hiding(self, rows: Rows) -> "StepPlan":
        """The plan without `rows` at the end of the block: they are neither computed nor attended to."""
        return self if is_subset(rows, self.hidden) else _hiding(self, self.hidden | rows)


@lru_cache(maxsize=4096)  # the same plans come again and again, and a kept plan has counted its rows already
def _within(plan: StepPlan, rows: Rows) -> StepPlan:
    kind: Kind = plan.kind
    if kind == "full":
        kind = "sub"
    if kind == "sub" and not rows:
        kind = "reused"
    return _cut(plan, rows, kind, plan.hidden)


@lru_cache(maxsize=4096)
def _also_reading(plan: StepPlan, rows: Rows) -> StepPlan:
    attention, keys_values, mlp = plan.layers[-1]
    last = LayerRows(attention | rows, keys_values, mlp | rows)
    return replace(plan, reads=plan.reads | rows, layers=(*plan.layers[:-1], last))


@lru_cache(maxsize=4096)
def _hiding(plan: StepPlan, hidden: Rows) -> StepPlan:
    return _cut(plan, plan.window & ~hidden, plan.kind, hidden)


def _cut(plan: StepPlan, rows: Rows, kind: Kind, hidden: Rows) -> StepPlan:
    return replace(
        plan,
        kind=kind,
        window=rows,
        reads=plan.reads & rows,
        hidden=hidden,
        layers=tuple(
            layer for run in plan.runs for layer in (LayerRows(*(part & rows for part in run.rows)),) * run.length
        ),
    )


def layer_runs(layers: Sequence[LayerRows]) -> Iterator[LayerRun]:
    """Groups consecutive layers that run the same rows. The last layer is a run of its own: fewer rows go on there."""
    first = 0
    for index in range(1, len(layers) + 1):
        if index >= len(layers) - 1 or layers[index] != layers[first]:
            yield LayerRun(first, index, layers[first])
            first = index


@lru_cache(maxsize=4096)
def whole_plan(kind: Kind, *, window: Rows, reads: Rows, layers: int, prediction: Prediction = NEXT) -> StepPlan:
    """Runs every layer on every row of the window; after the last layer's keys and values, only the rows it reads."""
    inner = LayerRows(window, window, window)
    last = LayerRows(reads, window, reads)
    return StepPlan(kind, window, reads, (inner,) * (layers - 1) + (last,), prediction)


@lru_cache(maxsize=64)
def empty_plan(layers: int) -> StepPlan:
    """No forward: the last logits stand."""
    return StepPlan("reused", NO_ROWS, NO_ROWS, (LayerRows(NO_ROWS, NO_ROWS, NO_ROWS),) * layers)
