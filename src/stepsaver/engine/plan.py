"""What one sample's next step computes. A plan is the only way to leave work out.

For every layer, a plan names the positions whose attention runs, the positions whose keys and values are rewritten, and
the positions whose MLP runs. If a sublayer does not run for a position of the window, the position takes its delta
from the delta cache. In the last layer, only the positions that are read go on after the keys and values.
`rules/rule.py` has the plans of denoising steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from stepsaver.engine.positions import NEXT, NO_POSITIONS, Positions, Prediction, describe, is_subset, positions_between

Kind = Literal["prefill", "full", "sub", "commit", "reused", "draft", "verify"]


class LayerPositions(NamedTuple):
    """The positions that run in one layer, per kind of work."""

    attention: Positions
    keys_values: Positions
    mlp: Positions


class LayerRun(NamedTuple):
    """Consecutive layers, first to last - 1, that run the same positions."""

    first: int
    last: int
    positions: LayerPositions

    @property
    def length(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class StepPlan:
    kind: Kind
    window: Positions  # the positions that carry a hidden state through this step
    reads: Positions  # the positions whose logits are read
    layers: tuple[LayerPositions, ...]
    prediction: Prediction = NEXT  # which tokens the reads predict
    hidden: Positions = NO_POSITIONS  # positions at the end of the block that are neither computed nor attended to
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

    def _layers_beside(self, other: "StepPlan") -> Iterable[tuple[LayerPositions, LayerPositions]]:
        """Pairs of layers of both plans; one pair per run if they have the same runs, as most plans do."""
        if len(self.runs) == len(other.runs) and all(
            mine.last == theirs.last for mine, theirs in zip(self.runs, other.runs, strict=True)
        ):
            return ((mine.positions, theirs.positions) for mine, theirs in zip(self.runs, other.runs, strict=True))
        return set(zip(self.layers, other.layers, strict=True))

    def __str__(self) -> str:
        if self.is_empty:
            return "reused: no forward"
        layers = "; ".join(
            f"layers {run.first}-{run.last - 1} attention {describe(run.positions.attention)}"
            f" keys {describe(run.positions.keys_values)} mlp {describe(run.positions.mlp)}"
            for run in self.runs
        )
        hidden = f"; hidden {describe(self.hidden)}" if self.hidden else ""
        return f"{self.kind}: positions {describe(self.window)}{hidden}; {layers}; head {describe(self.reads)}"

    @property
    def is_empty(self) -> bool:
        """No forward at all: the last logits stand."""
        return not self.window

    @property
    def positions(self) -> int:
        return self.window.bit_count()

    @property
    def predicted(self) -> Positions:
        """The positions whose tokens are predicted by the positions that are read, in the same order."""
        return self.prediction.predicted(self.reads)

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        return tuple(layer_runs(self.layers))

    @cached_property
    def run_everywhere(self) -> Positions:
        """The positions whose MLP runs in every layer but the last, where fewer positions go on."""
        positions = self.window
        for run in self.runs[:-1]:
            positions &= run.positions.mlp
        return positions

    @cached_property
    def rewritten(self) -> Positions:
        """The positions whose keys and values are rewritten in every layer."""
        positions = self.window
        for run in self.runs:
            positions &= run.positions.keys_values
        return positions

    @cached_property
    def rewrites_alike(self) -> bool:
        """Whether every layer rewrites the keys and values of the same positions."""
        return all(run.positions.keys_values == self.rewritten for run in self.runs)

    def carried(self, layer: int) -> Positions:
        """The positions that have a hidden state after this layer's keys and values."""
        return self.reads if layer == len(self.layers) - 1 else self.window

    @cached_property
    def attention_run(self) -> int:
        """Position-layers of attention that run."""
        return sum(run.length * run.positions.attention.bit_count() for run in self.runs)

    @cached_property
    def keys_values_run(self) -> int:
        return sum(run.length * run.positions.keys_values.bit_count() for run in self.runs)

    @cached_property
    def mlp_run(self) -> int:
        return sum(run.length * run.positions.mlp.bit_count() for run in self.runs)

    @cached_property
    def attention_reused(self) -> int:
        """Position-layers whose attention delta comes from the cache."""
        return self._row_layers_carried - self.attention_run

    @cached_property
    def mlp_reused(self) -> int:
        return self._row_layers_carried - self.mlp_run

    @property
    def _row_layers_carried(self) -> int:
        return (len(self.layers) - 1) * self.positions + self.reads.bit_count()

    def within(self, positions: Positions) -> "StepPlan":
        """The plan without the positions outside `positions`. Those keep their keys and values."""
        return self if is_subset(self.window, positions) else _within(self, self.window & positions)

    def also_reading(self, positions: Positions) -> "StepPlan":
        """The plan that also reads `positions` of its window. Only here does a plan get more work."""
        return self if is_subset(self.window & positions, self.reads) else _also_reading(self, self.window & positions)

    def hiding(self, positions: Positions) -> "StepPlan":
        """The plan without `positions` at the end of the block: they are neither computed nor attended to."""
        return self if is_subset(positions, self.hidden) else _hiding(self, self.hidden | positions)


@lru_cache(maxsize=4096)  # the same plans come again and again, and a kept plan has counted its positions already
def _within(plan: StepPlan, positions: Positions) -> StepPlan:
    kind: Kind = plan.kind
    if kind == "full":
        kind = "sub"
    if kind == "sub" and not positions:
        kind = "reused"
    return _cut(plan, positions, kind, plan.hidden)


@lru_cache(maxsize=4096)
def _also_reading(plan: StepPlan, positions: Positions) -> StepPlan:
    attention, keys_values, mlp = plan.layers[-1]
    last = LayerPositions(attention | positions, keys_values, mlp | positions)
    return replace(plan, reads=plan.reads | positions, layers=(*plan.layers[:-1], last))


@lru_cache(maxsize=4096)
def _hiding(plan: StepPlan, hidden: Positions) -> StepPlan:
    return _cut(plan, plan.window & ~hidden, plan.kind, hidden)


def _cut(plan: StepPlan, positions: Positions, kind: Kind, hidden: Positions) -> StepPlan:
    return replace(
        plan,
        kind=kind,
        window=positions,
        reads=plan.reads & positions,
        hidden=hidden,
        layers=tuple(
            layer
            for run in plan.runs
            for layer in (LayerPositions(*(each & positions for each in run.positions)),) * run.length
        ),
    )


def layer_runs(layers: Sequence[LayerPositions]) -> Iterator[LayerRun]:
    """Groups consecutive layers that run the same positions. The last layer is a run of its own: fewer positions go on
    there.
    """
    first = 0
    for index in range(1, len(layers) + 1):
        if index >= len(layers) - 1 or layers[index] != layers[first]:
            yield LayerRun(first, index, layers[first])
            first = index


@lru_cache(maxsize=4096)
def whole_plan(
    kind: Kind, *, window: Positions, reads: Positions, layers: int, prediction: Prediction = NEXT
) -> StepPlan:
    """Runs every layer on every position of the window; after the last layer's keys and values, only the positions it
    reads.
    """
    inner = LayerPositions(window, window, window)
    last = LayerPositions(reads, window, reads)
    return StepPlan(kind, window, reads, (inner,) * (layers - 1) + (last,), prediction)


@lru_cache(maxsize=64)
def empty_plan(layers: int) -> StepPlan:
    """No forward: the last logits stand."""
    return StepPlan(
        "reused", NO_POSITIONS, NO_POSITIONS, (LayerPositions(NO_POSITIONS, NO_POSITIONS, NO_POSITIONS),) * layers
    )


@lru_cache(maxsize=256)
def prefill_plan(positions: int, *, reads_last: bool, layers: int, prediction: Prediction = NEXT) -> StepPlan:
    """Runs positions of the context. With `reads_last`, also reads the token that opens the first block."""
    window = positions_between(0, positions)
    reads = opening_readers(positions, prediction.of_context) if reads_last else NO_POSITIONS
    return whole_plan("prefill", window=window, reads=reads, layers=layers, prediction=prediction.of_context)


@lru_cache(maxsize=64)
def commit_plan(block_size: int, *, layers: int, prediction: Prediction = NEXT) -> StepPlan:
    """Runs all positions of a finished block, and reads the token that opens the next block."""
    window, reads = positions_between(0, block_size), opening_readers(block_size, prediction.of_context)
    return whole_plan("commit", window=window, reads=reads, layers=layers, prediction=prediction.of_context)


def opening_readers(positions: int, prediction: Prediction) -> Positions:
    """The position, among the first `positions`, that predicts the token after them, which opens the next block; maybe
    none.
    """
    return prediction.readers(1 << positions) & positions_between(0, positions)
