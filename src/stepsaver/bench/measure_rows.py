"""Measures `RowCosts` on this machine: real forwards of the engine on scratch caches, and real ticks of a decode.

A forward is run four times with the same rows: whole, without the attention of its layers, without their MLPs as well
(all deltas from the cache), and without its head. The difference between two of them is the time of a part. Where all
layers run in one call, that call is timed alone, and divided by multiplications. The same rows, once as one sample's
and once as those of many, tell what each sample's context costs, however few its rows. All are interleaved, and every
figure is the lower quartile of its repeats: a disturbance only ever adds time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from stepsaver.bench.identity import device_name
from stepsaver.engine.batch import BatchContext, Turn, execute
from stepsaver.engine.cache import DeltaCache, KeyValueCache
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import DecodingSettings, resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Forward, Memory
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import LayerRows, StepPlan, whole_plan
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.row_costs import RowCosts, predicted_seconds
from stepsaver.engine.rows import NO_ROWS, rows_between
from stepsaver.engine.rules.layer_reuse import LayerReuse
from stepsaver.engine.rules.light_commit import LightCommit
from stepsaver.engine.rules.near_rows import NearRows
from stepsaver.engine.rules.previous_row import PreviousRow
from stepsaver.engine.rules.rule import Rule, check_rules
from stepsaver.engine.rules.trim import Trim
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.state import Request, Sample, request_key
from stepsaver.engine.trace import ForwardRecord, LayersRun, Trace, sample_step

BUDGET_SECONDS = 45.0
MOST_ROWS = 1024
SAMPLE_ROWS = 32  # the most of one sample: a block
LONG_CONTEXT = 512  # the most that our own kernel attends to; curves are measured at a quarter of it
LEAST_REPEATS, REPEATS = 3, 7
ROUND = 5.0  # about how long a round of all takes, in whole forwards of the most rows
TICK_BATCHES = (1, 8)
TICK_RULES: tuple[Rule, ...] = (PreviousRow(), Trim(), NearRows(), LightCommit())  # what planning costs with rules
KEEPING_RULES: tuple[Rule, ...] = (LayerReuse(k=2, layers="first"),)
TICK_TOKENS = 8

# "layers" is the one call that runs all layers, alone; "one row" is whole, but all rows but one reuse
# their deltas; "few read" is whole, but reads a quarter of its rows
Runs = Literal["whole", "mlp", "nothing", "no head", "layers", "one row", "few read"]
RUNS: tuple[Runs, ...] = ("whole", "mlp", "nothing", "no head")
STACKED_RUNS: tuple[Runs, ...] = ("whole", "layers", "nothing", "no head")
FEW_ROWS_RUNS: tuple[Runs, ...] = ("one row", "few read")  # of one sample, where layers run in one call


class Layout(NamedTuple):
    """How rows are spread over samples: each has `rows` of them, which see `context` rows, themselves included."""

    samples: int
    rows: int
    context: int


@dataclass
class Scratch:
    """Samples without a text, whose forwards read and write caches that nobody else uses."""

    model: Transformer
    decoding: DecodingSettings
    layout: Layout  # the largest that is run

    def __post_init__(self) -> None:
        model, (slots, rows, capacity) = self.model, self.layout
        kept = {"dtype": model.dtype, "device": model.device}
        cache = KeyValueCache(model.config, slots=slots, capacity=capacity, **kept)  # type: ignore[arg-type]
        cache.stored.zero_()  # memory that nobody has touched is all the same page
        every = frozenset(range(model.config.layers))
        deltas = DeltaCache(model.config, layers=every, slots=slots, block_size=rows, **kept)  # type: ignore[arg-type]
        deltas.stored.zero_()  # memory that nothing has written may hold NaN
        memory = Memory(cache, None, model.rotations(capacity))
        decoding = replace(self.decoding, prefix_cache=True)
        self.plain = BatchContext(model, memory, Denoise(Fixed()), decoding, Sampling(), slots)
        self.keeping = replace(self.plain, memory=memory._replace(deltas=deltas))
        self.contexts = {"whole": self.plain, "few read": self.plain}
        request = Request((0,), SAMPLE_ROWS, request_key((0,), None))
        self.samples: list[Sample] = [self.plain.decoder.join(self.plain, slot, request, slot) for slot in range(slots)]

    def seconds(self, layout: Layout, runs: Runs) -> float:
        """Returns the seconds of one forward, including the choice of tokens, or of its layers alone."""
        plan = _plan(layout.rows, runs, self.model.config.layers)
        tokens = np.zeros(layout.rows, dtype=np.int64)
        start = layout.context - layout.rows
        turns = [
            Turn(sample, sample.block, Step(sample.slot, start, tokens, layout.rows, plan))
            for sample in self.samples[: layout.samples]
        ]
        if runs == "layers":
            return self._layers_seconds([turn.step for turn in turns])
        return execute(self.contexts.get(runs, self.keeping), turns).seconds

    @torch.inference_mode()
    def _layers_seconds(self, steps: list[Step]) -> float:
        model, memory = self.model, self.plain.memory
        forward = Forward(model, memory, steps)
        started = perf_counter()
        forward.run_layers(range(model.config.layers))
        return perf_counter() - started


def _plan(rows: int, runs: Runs, layers: int) -> StepPlan:
    window = rows_between(0, rows)
    if runs in ("whole", "layers", "few read"):
        reads = rows_between(0, max(rows // 4, 1)) if runs == "few read" else window
        return whole_plan("sub", window=window, reads=reads, layers=layers)
    if runs == "one row":
        return StepPlan("sub", window, window, (LayerRows(1, window, 1),) * layers)
    reads = NO_ROWS if runs == "no head" else window
    return StepPlan("sub", window, reads, (LayerRows(NO_ROWS, NO_ROWS, window if runs == "mlp" else NO_ROWS),) * layers)


Taken = dict[tuple[Layout, Runs], float]  # seconds


def measure_row_costs(
    model: Transformer,
    *,
    decoding: DecodingSettings | None = None,
    budget_seconds: float = BUDGET_SECONDS,
) -> RowCosts:
    """Takes about the budget at most, less for a small model; for a large one, fewer numbers of rows are measured."""
    started = perf_counter()
    decoding, config = decoding or resolve_decoding(model.config), model.config
    tick, sample, rule, history = _tick_seconds(model, decoding)
    long = min(LONG_CONTEXT, config.max_positions)
    slope, forward_row = _context_seconds(model, decoding, long, started + budget_seconds / 4)
    left = started + budget_seconds - perf_counter()
    context, block = long // 4, min(SAMPLE_ROWS, long // 4)
    counts = _row_counts(left / (LEAST_REPEATS * ROUND * forward_row))
    layouts = [Layout(max(rows // block, 1), min(rows, block), context) for rows in counts]
    parts, step, cached_row, stacked = _part_seconds(model, decoding, layouts, started + budget_seconds)
    context_row = max(slope.seconds - slope.samples * cached_row, 0.0) / slope.rows
    attended = [context * layout.samples * (context_row * layout.rows + cached_row) for layout in layouts]
    attention = [each / config.layers - seen for each, seen in zip(parts.attention, attended, strict=True)]
    mlp = [each / config.layers for each in parts.mlp]
    if model.packed_layers is not None:  # one call for both
        share = _attention_share(config)
        attention, mlp = ([part * each for each in attention] for part in (share, 1 - share))
    costs = RowCosts(
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        weights=f"{8 * model.bytes_per_weight:.3g} bits",
        threads=torch.get_num_threads(),
        shape=shape_text(config),
        layers=config.layers,
        keys_values_share=config.kv_heads / (config.heads + config.kv_heads),
        rows=tuple(layout.samples * layout.rows for layout in layouts),
        forward=_ascending(parts.forward),
        attention=_ascending(attention),
        mlp=_ascending(mlp),
        head=_ascending(parts.head),
        context_row=context_row,
        tick=tick,
        sample=sample,
        step=step,
        measuring=perf_counter() - started,
        rule=rule,
        history=history,
        cached_row=cached_row,
    )
    if stacked is None:
        return costs
    last_layer = _unpredicted_seconds(costs, "few read", stacked.few_read)
    reusing = _unpredicted_seconds(costs, "one row", stacked.one_row)
    return replace(costs, last_layer=last_layer, layer_apart=reusing / config.layers, layer_reused=stacked.layer_reused)


def _unpredicted_seconds(costs: RowCosts, runs: Runs, taken: dict[Layout, float]) -> float:
    """Returns what forwards took on top of the prediction."""
    unplanned = replace(costs, tick=0.0, sample=0.0)
    more = []
    for layout, seconds in taken.items():
        plan = _plan(layout.rows, runs, costs.layers)
        entries = tuple(
            sample_step(sample, plan, step=0, context=layout.context, revealed=0, recomputed_context=0)
            for sample in range(layout.samples)
        )
        layers = LayersRun(costs.layers, costs.layers, costs.layers)
        more.append(seconds - predicted_seconds(unplanned, ForwardRecord(0.0, 0.0, layers, entries, 0)))
    return max(median(more), 0.0)


class Stacked(NamedTuple):
    """What is measured only where layers run in one call."""

    few_read: dict[Layout, float]  # seconds of whole forwards that read few of their rows
    one_row: dict[Layout, float]  # and of such in which all rows but one reuse their deltas
    layer_reused: float  # seconds of a layer that runs nothing


class Parts(NamedTuple):
    """Seconds of the parts of a forward, those of all layers together, in each layout."""

    attention: list[float]  # with the MLP where one call runs both
    mlp: list[float]
    head: list[float]
    forward: list[float]


def _part_seconds(
    model: Transformer, decoding: DecodingSettings, layouts: Sequence[Layout], until: float
) -> tuple[Parts, float, float, Stacked | None]:
    """Returns seconds: of the parts; of packing one more sample's rows; of one more sample's context, by row and layer;
    and what is measured only where layers run in one call.
    """
    largest, is_stacked = layouts[-1], model.packed_layers is not None
    apart = Layout(min(largest.rows, largest.samples), 1, largest.context)  # as many rows as samples
    together = Layout(1, apart.samples, largest.context)
    wanted = dict.fromkeys((layout, runs) for layout in layouts for runs in (STACKED_RUNS if is_stacked else RUNS))
    wanted |= dict.fromkeys((layout, runs) for layout in (apart, together) for runs in ("whole", "no head"))
    few = [each for each in layouts if is_stacked and each.samples == 1 and each.rows >= 4]
    wanted |= dict.fromkeys((layout, runs) for layout in few for runs in FEW_ROWS_RUNS)
    taken = _measure(Scratch(model, decoding, largest), list(wanted), until)
    head = [taken[each, "nothing"] - taken[each, "no head"] for each in layouts]
    if is_stacked:
        whole, layers = ([taken[each, runs] for each in layouts] for runs in ("whole", "layers"))
        forward = [a - b - c for a, b, c in zip(whole, layers, head, strict=True)]
        parts = Parts(layers, [0.0] * len(layers), head, forward)
    else:
        attention = [taken[each, "whole"] - taken[each, "mlp"] for each in layouts]
        mlp = [taken[each, "mlp"] - taken[each, "nothing"] for each in layouts]
        parts = Parts(attention, mlp, head, [taken[each, "no head"] for each in layouts])
    more = max(apart.samples - 1, 1)
    step = (taken[apart, "no head"] - taken[together, "no head"]) / more
    attending = (taken[apart, "whole"] - taken[together, "whole"]) / more - step
    cached_row = max(attending, 0.0) / (model.config.layers * largest.context)
    stacked = None
    if few:
        few_read, one_row = ({each: taken[each, runs] for each in few} for runs in ("few read", "one row"))
        reused = median([taken[each, "no head"] - parts.forward[layouts.index(each)] for each in few])
        stacked = Stacked(few_read, one_row, max(reused, 0.0) / model.config.layers)
    return parts, max(step, 0.0), cached_row, stacked


def _attention_share(config: ModelConfig) -> float:
    """Of a layer's multiplications, those of attention; nobody can tell its time from the MLP's in one call."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    return attention / (attention + 3 * config.hidden * config.mlp)


class ContextSlope(NamedTuple):
    """The seconds of one more row of context in one layer, for `samples` samples that have `rows` rows in all."""

    seconds: float
    samples: int
    rows: int


def _context_seconds(
    model: Transformer, decoding: DecodingSettings, long: int, until: float
) -> tuple[ContextSlope, float]:
    """Returns what more context costs, and the seconds of a row of a forward, all included."""
    near, far = (Layout(4, max(min(SAMPLE_ROWS, long // 4) // 2, 1), seen) for seen in (long // 4, long))
    taken = _measure(Scratch(model, decoding, far), [(near, "whole"), (far, "whole")], until)
    more = max(taken[far, "whole"] - taken[near, "whole"], 0.0)
    rows = near.samples * near.rows
    slope = more / (model.config.layers * (far.context - near.context))
    return ContextSlope(slope, near.samples, rows), taken[near, "whole"] / rows


def shape_text(config: ModelConfig) -> str:
    heads = f"{config.heads} heads ({config.kv_heads}) of {config.head_dim}"
    return f"{config.layers} layers of {config.hidden}, {heads}, mlp {config.mlp}, vocabulary {config.vocab}"


def _row_counts(most: float) -> list[int]:
    """Returns 1, 2, 4 ... up to `most` rows, but at least up to those of a block."""
    last = min(max(most, SAMPLE_ROWS), MOST_ROWS)
    return [1 << power for power in range(MOST_ROWS.bit_length()) if 1 << power <= last]


def _measure(scratch: Scratch, wanted: Sequence[tuple[Layout, Runs]], until: float) -> Taken:
    """Measures all that is wanted in rounds, in alternating order, until there are enough or the time is up."""
    times: dict[tuple[Layout, Runs], list[float]] = {each: [] for each in wanted}
    for layout, runs in wanted:
        if layout.samples * layout.rows <= SAMPLE_ROWS:
            scratch.seconds(layout, runs)  # warm-up, where it is a large share
    for turn in range(REPEATS):
        if turn >= LEAST_REPEATS and perf_counter() > until:
            break
        for each in wanted if turn % 2 else reversed(wanted):
            times[each].append(scratch.seconds(*each))
    return {each: float(np.quantile(seconds, 0.25)) for each, seconds in times.items()}


def _ascending(seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns seconds that never fall: more rows never take less, so a fall is noise and is evened out."""
    return tuple(isotonic_regression(np.maximum(seconds, 0.0)).x.tolist())


def _tick_seconds(model: Transformer, decoding: DecodingSettings) -> tuple[float, float, float, float]:
    """Returns the seconds of a tick beside its forward, of each sample in it, of each rule for a sample, and of keeping
    deltas for a sample: measured in real decodes of few and more samples, without rules and with those that fit.
    """
    fitting, keeping = (
        tuple(rule for rule in rules if _fits(rule, decoding, model.config.layers))
        for rules in (TICK_RULES, KEEPING_RULES)
    )
    few, more = TICK_BATCHES
    wanted: tuple[tuple[int, tuple[Rule, ...]], ...] = ((few, ()), (more, ()), (more, fitting), (more, keeping))
    taken: list[list[float]] = [[] for _ in wanted]
    for _ in range(LEAST_REPEATS):
        for (batch, rules), seconds in zip(wanted, taken, strict=True):
            trace = Trace()
            settings = replace(decoding, stop_ids=())
            engine = Engine(model, decoder=Denoise(Fixed(), rules), batch_size=batch, decoding=settings)
            for _ in engine.generate([Prompt((0,))] * batch, max_new_tokens=TICK_TOKENS, trace=trace):
                pass
            seconds += [record.seconds - record.forward_seconds for record in trace.records]
    of_few, of_more, with_rules, with_deltas = map(median, taken)
    sample = max((of_more - of_few) / (more - few), 0.0)
    rule = max(with_rules - of_more, 0.0) / (more * max(len(fitting), 1))
    history = max(with_deltas - of_more, 0.0) / more
    return max(of_few - few * sample, 0.0), sample, rule, history


def _fits(rule: Rule, decoding: DecodingSettings, layers: int) -> bool:
    try:
        check_rules((rule,), decoding, layers)
    except UsageError:
        return False
    return True
