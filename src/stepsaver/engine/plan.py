"""What one sample's next step computes. A plan is the only way to leave work out.

A plan names, for every layer, the rows whose attention runs, the rows whose keys and values are rewritten, and the rows
whose MLP runs. A row of the window whose part does not run takes that part's delta from the delta cache. In the last
layer only the rows whose logits are read go on behind the keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from stepsaver.engine.rows import NO_ROWS, Rows, describe, is_subset, rows_between

Kind = Literal["prefill", "full", "sub", "commit", "reused"]


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
    ask_after: int | None = None  # the rules are asked again when this layer has run

    def __le__(self, other: "StepPlan") -> bool:
        """Whether this plan computes nothing that the other one does not."""
        return (
            is_subset(self.window, other.window)
            and is_subset(self.reads, other.reads)
            and all(
                is_subset(mine.attention, theirs.attention)
                and is_subset(mine.keys_values, theirs.keys_values)
                and is_subset(mine.mlp, theirs.mlp)
                for mine, theirs in set(zip(self.layers, other.layers, strict=True))  # few of them differ
            )
        )

    def __str__(self) -> str:
        if self.is_empty:
            return "reused: no forward"
        layers = "; ".join(
            f"layers {run.first}-{run.last - 1} attention {describe(run.rows.attention)}"
            f" keys {describe(run.rows.keys_values)} mlp {describe(run.rows.mlp)}"
            for run in self.runs
        )
        return f"{self.kind}: rows {describe(self.window)}; {layers}; head {describe(self.reads)}"

    @property
    def is_empty(self) -> bool:
        """No forward at all: the last logits stand."""
        return not self.window

    @property
    def rows(self) -> int:
        return self.window.bit_count()

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        return tuple(layer_runs(self.layers))

    @cached_property
    def run_everywhere(self) -> Rows:
        """The rows whose MLP runs in every layer, the last one aside, behind which fewer rows go on."""
        rows = self.window
        for run in self.runs[:-1]:
            rows &= run.rows.mlp
        return rows

    def carried(self, layer: int) -> Rows:
        """The rows that have a hidden state behind this layer's keys and values."""
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
        """The plan without the rows outside `rows`. Rows left out keep the keys and values that they have."""
        return self if is_subset(self.window, rows) else _within(self, self.window & rows)


@lru_cache(maxsize=4096)  # the same plans come again and again, and one that is kept has counted its rows already
def _within(plan: StepPlan, rows: Rows) -> StepPlan:
    return replace(
        plan,
        kind="sub" if rows else "reused",
        window=rows,
        reads=plan.reads & rows,
        layers=tuple(
            layer for run in plan.runs for layer in (LayerRows(*(part & rows for part in run.rows)),) * run.length
        ),
    )


def layer_runs(layers: Sequence[LayerRows]) -> Iterator[LayerRun]:
    """Groups consecutive layers that run the same rows. The last layer stands alone: behind it fewer rows go on."""
    first = 0
    for index in range(1, len(layers) + 1):
        if index >= len(layers) - 1 or layers[index] != layers[first]:
            yield LayerRun(first, index, layers[first])
            first = index


@lru_cache(maxsize=4096)
def whole_plan(kind: Kind, *, window: Rows, reads: Rows, layers: int) -> StepPlan:
    """Every layer on every row of the window; behind the last layer's keys and values only the rows that are read."""
    inner = LayerRows(window, window, window)
    return StepPlan(kind, window, reads, (inner,) * (layers - 1) + (LayerRows(reads, window, reads),))


@lru_cache(maxsize=64)
def empty_plan(layers: int) -> StepPlan:
    return StepPlan("reused", NO_ROWS, NO_ROWS, (LayerRows(NO_ROWS, NO_ROWS, NO_ROWS),) * layers)


def prefill_plan(rows: int, *, reads_last: bool, layers: int) -> StepPlan:
    reads = rows_between(rows - 1, rows) if reads_last else NO_ROWS
    return whole_plan("prefill", window=rows_between(0, rows), reads=reads, layers=layers)


def commit_plan(block_size: int, *, layers: int) -> StepPlan:
    """All rows of a finished block; its last row predicts the first token of the next block."""
    return whole_plan(
        "commit", window=rows_between(0, block_size), reads=rows_between(block_size - 1, block_size), layers=layers
    )
