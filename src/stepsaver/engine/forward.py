"""The loop over layers. It exists once: prefill, denoising steps and commits of several samples run through it.

The rows of all samples are packed into one matrix, so every projection is one matrix multiplication whatever state the
samples are in. Consecutive layers that run the same rows share their index tensors (`packing.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.attention import mix
from stepsaver.engine.cache import DeltaCache, KeyValueCache, keep_deltas
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.models.transformer import Layer, Transformer
from stepsaver.engine.packing import PackedRun, Part, Step, Subset, pack_rows, pack_run, run_end

PartName = Literal["attention", "mlp"]


class Memory(NamedTuple):
    """What a forward reads and writes beside its rows."""

    cache: KeyValueCache
    deltas: DeltaCache | None
    rotations: Rotation  # of all positions
    probe_layers: frozenset[int] = frozenset()  # whose drift is measured
    observe: "Observe | None" = None


# Sees each part's delta of the rows that ran: layer, part, delta, and the steps whose rows they are.
Observe = Callable[[int, PartName, Tensor, Sequence[Step]], None]
Ask = Callable[[Sequence[Step], Tensor], Sequence[Step]]


@dataclass
class Executed:
    """What the parts did, counted from the tensors that went in: row-layers, and layers that ran at all."""

    attention: int = 0
    keys_values: int = 0
    mlp: int = 0
    head: int = 0
    attention_layers: int = 0
    keys_values_layers: int = 0
    mlp_layers: int = 0

    def count_attention(self, rows: int) -> None:
        self.attention += rows
        self.attention_layers += 1

    def count_keys_values(self, rows: int) -> None:
        self.keys_values += rows
        self.keys_values_layers += 1

    def count_mlp(self, rows: int) -> None:
        self.mlp += rows
        self.mlp_layers += 1


class Stream:
    """The residual stream of the rows that are carried: their hidden states, and a delta still to be added to all.

    Adding it is left to the norm of the next part, which reads every row anyway.
    """

    def __init__(self, h_ND: Tensor) -> None:
        self.h_ND = h_ND
        self.pending: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor | None]:
        """The hidden states, and the delta that the caller promises to add to them in place."""
        pending, self.pending = self.pending, None
        return self.h_ND, pending

    def settled(self) -> Tensor:
        """The hidden states with everything added."""
        if self.pending is not None:
            self.h_ND += self.pending
            self.pending = None
        return self.h_ND

    def keep(self, places: Tensor) -> None:
        """Lets only some rows go on."""
        self.h_ND = self.settled()[places]

    def add(self, delta: Tensor, rows: Subset) -> None:
        self.settled()
        if rows.places is None:
            self.pending = delta
        else:
            self.h_ND.index_add_(0, rows.places, delta)


class StepOutput(NamedTuple):
    logits: Tensor  # [rows read, V], sample by sample, in row order
    executed: Executed
    drift: Tensor | None  # [rows], in the probe layers, where there are any
    steps: Sequence[Step]  # with the plans as they were when their last layer had run


@torch.inference_mode()
def run_step(model: Transformer, memory: Memory, steps: Sequence[Step], ask: Ask | None = None) -> StepOutput:
    """Runs the plans of several samples through all layers.

    Where a plan says so, `ask` is given the drift measured so far and answers with the steps for the layers behind.
    """
    executed = Executed()
    rows = pack_rows(steps, model.device)
    rotation = memory.rotations[rows.positions]
    drift = None
    if memory.probe_layers and memory.deltas is not None:
        drift = torch.zeros(len(rows.tokens), dtype=torch.float32, device=model.device)
    stream = Stream(model.embedding(rows.tokens))
    layers = tuple(model.layers)
    first = 0
    while first < model.config.layers:
        last = run_end(steps, first)
        run = pack_run(
            steps,
            first,
            rows=rows,
            rotation=rotation,
            cache=memory.cache,
            deltas=memory.deltas,
        )
        for index in range(first, last):
            layer = layers[index]
            assert isinstance(layer, Layer)
            _run_layer(layer, index, stream, run, memory, executed, drift, steps)
        if ask is not None and any(step.plan.ask_after == last - 1 for step in steps):
            assert drift is not None, "a plan asks for a drift that nobody measures"
            steps = ask(steps, drift)
        first = last
    h_ND, pending = stream.take()
    executed.head += h_ND.shape[0]
    logits = model.logits(h_ND, added=pending) if h_ND.shape[0] else h_ND.new_empty((0, model.config.vocab))
    return StepOutput(logits, executed, drift, steps)


def _run_layer(
    layer: Layer,
    index: int,
    stream: Stream,
    run: PackedRun,
    memory: Memory,
    executed: Executed,
    drift_N: Tensor | None,
    steps: Sequence[Step],
) -> None:
    """One layer: rewrite keys and values, mix, add the deltas that ran and those that are reused."""
    attention, cache = layer.attention, memory.cache
    mixed = None
    if run.is_fused:
        assert run.places is not None
        h_ND, pending = stream.take()
        projected = attention.project(h_ND, added=pending)
        mixed = mix(projected, run.query_rotation, cache, index, places=run.places, attending=run.attending)
        executed.count_keys_values(projected.shape[0])
    else:
        h_ND = stream.settled()
        if run.places is not None:
            projected = attention.project(run.keys_values.select(h_ND), attention.kv_rows)
            mix(projected, run.keys_values_rotation, cache, index, places=run.places)
            executed.count_keys_values(projected.shape[0])
        if run.queries.size:
            projected = attention.project(run.queries.select(h_ND), attention.query_rows)
            mixed = mix(projected, run.query_rotation, cache, index, attending=run.attending)
        if run.kept is not None:
            stream.keep(run.kept)
    deltas = None if memory.deltas is None else memory.deltas.by_layer.get(index)
    delta = None
    if mixed is not None:
        delta = attention.finish(mixed)
        executed.count_attention(delta.shape[0])
        if memory.observe is not None:
            memory.observe(index, "attention", delta, steps)
    probe = drift_N if index in memory.probe_layers else None
    _add(stream, delta, run.attention, None if deltas is None else deltas.attention, probe)
    delta = None
    if run.mlp.ran.size:
        if run.mlp.ran.places is None:
            h_ND, pending = stream.take()
            delta = layer.mlp(h_ND, added=pending)
        else:
            delta = layer.mlp(run.mlp.ran.select(stream.settled()))
        executed.count_mlp(delta.shape[0])
        if memory.observe is not None:
            memory.observe(index, "mlp", delta, steps)
    _add(stream, delta, run.mlp, None if deltas is None else deltas.mlp, probe)


def _add(stream: Stream, delta: Tensor | None, part: Part, stored: Tensor | None, drift_N: Tensor | None) -> None:
    """Adds a part's delta to the rows that ran and, from the cache, to those that did not; keeps what ran."""
    if delta is not None:
        stream.add(delta, part.ran)
        if stored is not None:
            if drift_N is not None:
                _measure_drift(drift_N, delta, stored[part.ran_delta_index], part.ran)
            keep_deltas(stored, part.ran_delta_index, delta)
    if part.reused.size:
        assert stored is not None, "a plan reuses a layer whose deltas nobody keeps"
        stream.add(stored[part.reused_delta_index], part.reused)


def _measure_drift(drift_N: Tensor, delta: Tensor, before: Tensor, rows: Subset) -> None:
    """Raises each row's drift to the relative change of this delta. The caller knows whose old delta means anything."""
    change = (torch.linalg.vector_norm(delta - before, dim=-1) / torch.linalg.vector_norm(delta, dim=-1)).float()
    if rows.places is None:
        torch.maximum(drift_N, change, out=drift_N)
    else:
        drift_N[rows.places] = torch.maximum(drift_N[rows.places], change)
