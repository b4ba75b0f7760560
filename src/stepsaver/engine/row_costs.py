"""How long rows take on one machine (measured by `bench/measure_rows.py`), and the time predicted for a trace.

Operations alone predict well where compute is the limit. Where reading weights or calling operations is the limit, a
forward of few rows takes longer than its share. `RowCosts` says how much longer, for one machine, precision, number of
threads and model shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import log2
from typing import Any, NamedTuple

import numpy as np

from stepsaver.engine.rules.rule import Rule, keep_deltas
from stepsaver.engine.trace import ForwardRecord, SampleStep, Trace

CAUSAL_KINDS = ("prefill", "verify")  # a row sees fewer rows than the last one does: half of the step's on average

Curve = tuple[float, ...]  # seconds for each measured number of rows


class Planning(NamedTuple):
    """What the planning of a step depends on."""

    rules: int = 0
    keeps_deltas: bool = False


NO_RULES = Planning()


def planning_of(rules: Sequence[Rule], layers: int) -> Planning:
    return Planning(len(rules), keep_deltas(rules, layers))


@dataclass(frozen=True)
class RowCosts:
    """Seconds of a forward and its parts by packed rows. Attention and MLP are for one layer and without context.

    `forward` is everything outside the layers' parts and the head: packing, embedding, keeping deltas.
    """

    device: str
    dtype: str
    weights: str  # in how many bits each weight is kept
    threads: int
    shape: str
    layers: int
    keys_values_share: float  # share of keys and values in the attention's multiplications
    rows: tuple[int, ...]  # ascending
    forward: Curve
    attention: Curve
    mlp: Curve
    head: Curve  # including the choice of tokens
    context_row: float  # per query, row of context and layer
    tick: float  # planning and choosing, per tick
    sample: float  # and per sample in a tick
    step: float  # per step that a forward packs
    measuring: float  # seconds that the measurement took
    rule: float = 0.0  # planning, per rule and sample in a tick
    history: float = 0.0  # the same where a rule keeps deltas: what each layer computed is noted, row by row
    cached_row: float = 0.0  # per row of a step's context and layer, however few the queries: the row has to be read
    # where layers run in one call:
    last_layer: float = 0.0  # of a last layer that reads fewer rows than it has, which is a call of its own
    layer_apart: float = 0.0  # of a layer of which some rows reuse a delta, on top of its rows
    layer_reused: float = 0.0  # of a layer that runs nothing, because all rows reuse their deltas

    def planned_sample(self, planning: Planning) -> float:
        """Seconds of planning and choosing, per sample in a tick."""
        return self.sample + planning.rules * self.rule + (self.history if planning.keeps_deltas else 0.0)

    @property
    def forward_rows(self) -> float:
        """The cost of a forward on top of its rows, in rows: from the line that fits all measurements best, by ratio.

        Rounded to a power of two, so that measurement noise seldom changes what a decode does.
        """
        rows = np.array(self.rows, dtype=np.float64)
        seconds = np.array([self.whole_forward(each) for each in self.rows]) + self.tick + self.sample
        terms = np.stack([1 / seconds, rows / seconds], axis=1)
        fixed, each_row = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
        most = float(self.rows[-1])
        if len(rows) < 2 or each_row <= 1e-9 * fixed:  # a slope of 0 comes out as 1e-16 on some machines
            return most
        return float(2 ** round(log2(max(fixed / each_row, 1.0))))

    def whole_forward(self, rows: float) -> float:
        """Seconds of a forward that runs all layers and reads all its rows, without context."""
        layer = self.seconds_of(self.attention, rows) + self.seconds_of(self.mlp, rows)
        return self.seconds_of(self.forward, rows) + self.layers * layer + self.seconds_of(self.head, rows)

    def seconds_of(self, curve: Curve, rows: float) -> float:
        """Seconds for a number of rows, on the line between two measured numbers; above the last two, on their line."""
        if rows <= 0:
            return 0.0
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, curve))
        known, before = (self.rows[-1], self.rows[-2]) if len(self.rows) > 1 else (self.rows[-1], 0)
        slope = (curve[-1] - (curve[-2] if len(curve) > 1 else 0.0)) / (known - before)
        return curve[-1] + slope * (rows - known)

    def as_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def row_costs_from_json(content: dict[str, Any]) -> RowCosts:
    """Raises TypeError if a value has the wrong type, and ValueError if the curves do not fit the rows."""
    values: dict[str, Any] = {}
    for each in fields(RowCosts):
        if each.name not in content and each.default is not MISSING:
            continue  # the file is from before this was measured
        value, is_text = content[each.name], each.type is str
        numbers = value if isinstance(value, list) else [] if is_text else [value]
        if is_text != isinstance(value, str) or any(type(number) not in (int, float) for number in numbers):
            raise TypeError(f"{each.name} {value!r} is not of its type")
        values[each.name] = tuple(value) if isinstance(value, list) else value
    costs = RowCosts(**values)
    curves = (costs.rows, costs.forward, costs.attention, costs.mlp, costs.head)
    if not all(isinstance(curve, tuple) and len(curve) == len(costs.rows) > 0 for curve in curves):
        raise ValueError("curves have other lengths than the rows")
    return costs


def predicted_seconds(costs: RowCosts, record: ForwardRecord, planning: Planning = NO_RULES) -> float:
    """Seconds of one record: planning, forward and choices. Without rows, planning only."""
    entries = record.entries
    seconds = costs.tick + costs.planned_sample(planning) * len({entry.sample for entry in entries})
    running = [entry for entry in entries if entry.rows]
    if not running:
        return seconds
    head_rows = sum(entry.head_rows for entry in running)
    seconds += costs.step * len(running)
    seconds += costs.seconds_of(costs.forward, sum(entry.rows for entry in running))
    seconds += costs.seconds_of(costs.head, head_rows)
    attention, keys_values, mlp = (
        sum(part) for part in zip(*((e.attention_run, e.keys_values_run, e.mlp_run) for e in running), strict=True)
    )
    queries = _in_layers(costs, costs.attention, attention, record.layers.attention, head_rows)
    written = _in_layers(costs, costs.attention, keys_values, record.layers.keys_values)
    seconds += (1 - costs.keys_values_share) * queries + costs.keys_values_share * written
    seconds += _in_layers(costs, costs.mlp, mlp, record.layers.mlp, head_rows)
    seconds += costs.context_row * sum(entry.attention_run * _rows_seen(entry) for entry in running)
    seconds += costs.cached_row * sum(e.context * min(record.layers.attention, e.attention_run) for e in running)
    if head_rows < sum(entry.rows for entry in running):
        seconds += costs.last_layer
    reused = costs.layers - max(record.layers)
    apart = max(max(entry.attention_reused, entry.mlp_reused) / entry.rows for entry in running) - reused
    seconds += costs.layer_reused * reused + costs.layer_apart * max(apart, 0.0)
    return seconds + sum(_recomputing(costs, entry.recomputed_context) for entry in running)


def _in_layers(costs: RowCosts, curve: Curve, row_layers: int, layers: int, last: int = 0) -> float:
    """Seconds of a part in all layers that ran it, with the same number of rows in each. The last layer runs `last`
    rows: after its keys and values, only the rows that are read go on.
    """
    if not layers:
        return 0.0
    if layers > 1 and 0 < last < row_layers:
        rest = (row_layers - last) / (layers - 1)
        return (layers - 1) * costs.seconds_of(curve, rest) + costs.seconds_of(curve, last)
    return layers * costs.seconds_of(curve, row_layers / layers)


def _rows_seen(entry: SampleStep) -> float:
    """How many rows of context a row sees on average."""
    return entry.context - entry.rows / 2 if entry.kind in CAUSAL_KINDS else entry.context


def _recomputing(costs: RowCosts, context: int) -> float:
    """Seconds to run a context again because there is no prefix cache: a forward of its own that reads no row."""
    if not context:
        return 0.0
    layer = costs.seconds_of(costs.attention, context) + costs.seconds_of(costs.mlp, context)
    layer += costs.context_row * context * context / 2 + costs.cached_row * context
    return costs.step + costs.seconds_of(costs.forward, context) + costs.layers * layer


def predicted_total(costs: RowCosts, records: Iterable[ForwardRecord], planning: Planning = NO_RULES) -> float:
    return sum(predicted_seconds(costs, record, planning) for record in records)


def predicted_speed_up_here(baseline: Trace, other: Trace, costs: RowCosts, planning: Planning = NO_RULES) -> float:
    """The speed-up in tokens per second that `other`, planned in some way, should reach over `baseline`, which has no
    rules, on the measured machine.
    """
    ours = predicted_total(costs, other.records, planning) / other.tokens_generated
    return predicted_total(costs, baseline.records) / baseline.tokens_generated / ours
