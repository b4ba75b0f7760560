"""What rows take on one machine (measured by `bench/machine/measure_rows.py`), and what that predicts of a trace.

Operations alone predict where compute is the limit. Where reading weights or calling operations is, a forward of few
rows takes longer than its share: `RowCosts` holds how much longer, for one machine, precision, number of threads and
shape of a model.
"""

from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from math import log2
from typing import Any

import numpy as np

from stepsaver.engine.trace import ForwardRecord, SampleStep, Trace

CAUSAL_KINDS = ("prefill", "verify")  # whose rows see less than the last one: half of their own on average

Curve = tuple[float, ...]  # seconds, one for each number of rows that was measured


@dataclass(frozen=True)
class RowCosts:
    """Seconds of a forward and its parts by packed rows. Parts of layers are of one layer, and without their context.

    `forward` is everything of a forward that is no part of a layer and no head: packing, embedding, kept deltas.
    """

    device: str
    dtype: str
    weights: str  # how many bits are kept of each
    threads: int
    shape: str
    layers: int
    keys_values_share: float  # of the attention's multiplications that are those of keys and values
    rows: tuple[int, ...]  # ascending
    forward: Curve
    attention: Curve
    mlp: Curve
    head: Curve  # with the choice of tokens
    context_row: float  # of one query, one row of context and one layer
    tick: float  # planning and choosing of a tick
    sample: float  # and of each sample in it
    step: float  # of each step that a forward packs
    measuring: float  # seconds that it took
    rule: float = 0.0  # planning, of each rule and sample in a tick
    cached_row: float = 0.0  # of one row of context of a step and one layer, however few its queries: it is read

    @property
    def forward_rows(self) -> float:
        """What a forward costs beside its rows, in rows: the line nearest to all that was measured, by ratio.

        A power of two, so that noise in the measurement seldom changes what a decode does.
        """
        rows = np.array(self.rows, dtype=np.float64)
        seconds = np.array([self.whole_forward(each) for each in self.rows]) + self.tick + self.sample
        terms = np.stack([1 / seconds, rows / seconds], axis=1)
        fixed, each_row = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
        if len(rows) < 2 or each_row <= 0:
            return float(self.rows[-1])
        return float(2 ** round(log2(max(fixed / each_row, 1.0))))

    def whole_forward(self, rows: float) -> float:
        """A forward of all layers that reads all its rows; no context."""
        layer = self.seconds_of(self.attention, rows) + self.seconds_of(self.mlp, rows)
        return self.seconds_of(self.forward, rows) + self.layers * layer + self.seconds_of(self.head, rows)

    def seconds_of(self, curve: Curve, rows: float) -> float:
        """Between two numbers of rows that were measured, and beyond the last two, on the line through them."""
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
    """Raises TypeError or ValueError where something is not of its type, or the curves do not fit the rows."""
    values: dict[str, Any] = {}
    for each in fields(RowCosts):
        if each.name not in content and each.default is not MISSING:
            continue  # written before this was measured
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


def predicted_seconds(costs: RowCosts, record: ForwardRecord, rules: int = 0) -> float:
    """The seconds of one record, planned with a number of rules: planning, forward and choices. Without rows there is
    nothing but planning.
    """
    entries = record.entries
    seconds = costs.tick + (costs.sample + rules * costs.rule) * len({entry.sample for entry in entries})
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
    return seconds + sum(_recomputing(costs, entry.recomputed_context) for entry in running)


def _in_layers(costs: RowCosts, curve: Curve, row_layers: int, layers: int, last: int = 0) -> float:
    """What a part takes in all layers that ran it, on as many rows each; on `last` rows in the last of them, after
    whose keys and values only the rows that are read go on.
    """
    if not layers:
        return 0.0
    if layers > 1 and 0 < last < row_layers:
        rest = (row_layers - last) / (layers - 1)
        return (layers - 1) * costs.seconds_of(curve, rest) + costs.seconds_of(curve, last)
    return layers * costs.seconds_of(curve, row_layers / layers)


def _rows_seen(entry: SampleStep) -> float:
    """By a row on average."""
    return entry.context - entry.rows / 2 if entry.kind in CAUSAL_KINDS else entry.context


def _recomputing(costs: RowCosts, context: int) -> float:
    """A context that is run again because nobody kept it: a forward of its own that reads nothing."""
    if not context:
        return 0.0
    layer = costs.seconds_of(costs.attention, context) + costs.seconds_of(costs.mlp, context)
    layer += costs.context_row * context * context / 2 + costs.cached_row * context
    return costs.step + costs.seconds_of(costs.forward, context) + costs.layers * layer


def predicted_total(costs: RowCosts, records: Iterable[ForwardRecord], rules: int = 0) -> float:
    return sum(predicted_seconds(costs, record, rules) for record in records)


def predicted_speed_up_here(baseline: Trace, other: Trace, costs: RowCosts, rules: int = 0) -> float:
    """How many times as many tokens per second `other`, planned with a number of rules, should reach on the machine
    that was measured.
    """
    ours = predicted_total(costs, other.records, rules) / other.tokens_generated
    return predicted_total(costs, baseline.records) / baseline.tokens_generated / ours
