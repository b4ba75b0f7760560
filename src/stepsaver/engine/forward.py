"""The loop over layers. There is one: prefills, denoising steps and commits of all samples run through it.

The rows of all samples are packed into one matrix, so every projection is one matrix multiplication, whatever state the
samples are in. Consecutive layers that run the same rows share their index tensors (`packing.py`), and one call where
the backend has one. N packed rows, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import nan
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.backends.packed import PackedRun, RowSubset
from stepsaver.engine.cache import DeltaCache, KeyValueCache, SublayerDeltas
from stepsaver.engine.machine import require_own_threads
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.models.transformer import Attention, Transformer
from stepsaver.engine.packing import Packer, Step
from stepsaver.engine.stream import Stream

Sublayer = Literal["attention", "mlp"]


class Memory(NamedTuple):
    """What a forward reads and writes in addition to its rows."""

    cache: KeyValueCache
    deltas: DeltaCache | None
    rotations: Rotation  # of all positions
    probe_layers: frozenset[int] = frozenset()  # whose drift is measured
    observe: "Observe | None" = None


# Gets each sublayer's delta of the rows that ran: layer, sublayer, delta, and the steps that the rows belong to.
Observe = Callable[[int, Sublayer, Tensor, Sequence[Step]], None]
Ask = Callable[[Sequence[Step], Tensor], Sequence[Step]]


@dataclass
class Executed:
    """What the sublayers did, counted from their input tensors: positions x layers, and layers that ran on any row."""

    attention: int = 0
    keys_values: int = 0
    mlp: int = 0
    head: int = 0
    attention_layers: int = 0
    keys_values_layers: int = 0
    mlp_layers: int = 0

    def count(self, layers: int = 1, *, attention: int = 0, keys_values: int = 0, mlp: int = 0) -> None:
        """Some layers, each with so many rows that attend, write keys and values, and run the MLP."""
        self.attention += layers * attention
        self.keys_values += layers * keys_values
        self.mlp += layers * mlp
        self.attention_layers += layers if attention else 0
        self.keys_values_layers += layers if keys_values else 0
        self.mlp_layers += layers if mlp else 0


class StepOutput(NamedTuple):
    logits: Tensor  # [rows read, V], sample by sample, in row order
    executed: Executed
    drift: Tensor | None  # [rows], in the probe layers, if there are any
    steps: Sequence[Step]  # with the plans as they ran


@torch.inference_mode()
def run_step(model: Transformer, memory: Memory, steps: Sequence[Step], ask: Ask | None = None) -> StepOutput:
    """Runs the plans of several samples through all layers.

    Where a plan says so, `ask` gets the drift measured so far and returns the steps for the layers that follow.
    """
    require_own_threads()
    model.backend.begin()
    forward = Forward(model, memory, steps)
    while forward.runs:
        for layers, run in forward.runs:
            forward.run_layers(layers, run)
        if ask is not None and any(step.plan.ask_after == layers.stop - 1 for step in forward.steps):
            assert forward.drift_N is not None, "a plan asks for a drift that nobody measures"
            forward.steps = ask(forward.steps, forward.drift_N)
        forward.runs = forward.packer.runs(forward.steps, layers.stop)
    logits = forward.logits()
    if not len(logits):  # no token comes back for which the host would wait, and forwards are timed
        model.backend.wait(model.device)
    return StepOutput(logits, forward.executed, forward.drift_N, forward.steps)


class Forward:
    """The state of a forward between layers."""

    def __init__(self, model: Transformer, memory: Memory, steps: Sequence[Step]) -> None:
        self.model, self.memory, self.steps = model, memory, steps
        self.backend, self.layers = model.backend, model.each_layer
        self.packer = Packer(
            steps,
            rotations=memory.rotations,
            cache=memory.cache,
            deltas=memory.deltas,
            is_adapted=model.draft_adapter is not None,
        )
        self.runs = self.packer.runs(steps, 0)  # sends the tokens
        self.stream = Stream(model.embedding(self.packer.tokens))
        self.going: Tensor | None = None  # the rows that still go on, which are fewer in the last layer; None: all
        self.executed = Executed()
        self.drift_N: Tensor | None = None
        if memory.probe_layers and memory.deltas is not None:
            self.drift_N = torch.zeros(len(self.packer.tokens), dtype=torch.float32, device=model.device)

    def run_layers(self, layers: range, run: PackedRun) -> None:
        """Runs consecutive layers that run the same rows."""
        for span in self._spans(layers, run):
            if not self._run_together(span, run):
                for index in span:
                    self._run_layer(index, run)

    def logits(self) -> Tensor:
        """The logits of the rows that are read, sample by sample."""
        rows = len(self.stream.h_ND)
        self.executed.head += rows
        if not rows:
            return self.stream.h_ND.new_empty((0, self.model.config.vocab))
        return self.stream.through(self.model.logits, RowSubset(None, rows))

    def _run_layer(self, index: int, run: PackedRun) -> None:
        """h = h + attention(h), then h = h + mlp(h). A row that leaves a sublayer out takes the delta kept of it."""
        layer, kept = self.layers[index], self._kept(index)
        mixed = self._attend(layer.attention, index, run)
        self.going = run.kept
        self.stream.keep(run.kept)
        if mixed is not None:
            delta = layer.attention.finish(mixed)
            if self.packer.drafting is not None:
                self._add_adapter(index, mixed, delta, run)
            self._add("attention", index, delta, run.attention.ran, kept.attention)
        self._reuse(kept.attention, run.attention.reused)
        if run.mlp.ran.size:
            self._add("mlp", index, self.stream.through(layer.mlp, run.mlp.ran), run.mlp.ran, kept.mlp)
        self._reuse(kept.mlp, run.mlp.reused)

    def _add_adapter(self, index: int, mixed: Tensor, delta: Tensor, run: PackedRun) -> None:
        assert self.model.draft_adapter is not None
        assert self.packer.drafting is not None
        drafting = self.packer.drafting
        for some in (run.kept, run.attention.ran.indices):
            drafting = drafting if some is None else drafting[some]
        self.model.draft_adapter.add(index, mixed, delta, drafting)

    def _attend(self, attention: Attention, index: int, run: PackedRun) -> Tensor | None:
        """Rewrites keys and values, and mixes what the queries see. None if there are no queries."""
        mixed = None
        for rows in run.projected:
            wanted = attention.rows_of(queries=rows.attending is not None, keys_values=rows.places is not None)
            projected = self.stream.through(partial(attention.project, rows=wanted), rows.rows)
            self.executed.count(keys_values=0 if rows.places is None else len(projected))
            mixed = self.backend.attend(projected, rows, self.memory.cache, index, attention.head_norms)
        return mixed

    def _add(self, name: Sublayer, index: int, delta: Tensor, rows: RowSubset, kept: Tensor | None) -> None:
        """Adds what a sublayer made of some rows, and keeps it where it may be reused."""
        self.executed.count(**{name: len(delta)})
        if self.memory.observe is not None:
            self.memory.observe(index, name, delta, self.steps)
        self.stream.add(delta, rows)
        if kept is not None and rows.deltas is not None:
            if self._is_measured(index):
                self._note_drift(_relative_change(delta, kept[rows.deltas]), rows)
            self.backend.copy_rows(delta, kept, rows.deltas)

    def _reuse(self, kept: Tensor | None, rows: RowSubset) -> None:
        if rows.size:
            assert kept is not None, "a plan reuses a layer whose deltas nobody keeps"
            self.stream.add(kept[rows.deltas], rows)

    def _kept(self, index: int) -> SublayerDeltas:
        deltas = self.memory.deltas
        return SublayerDeltas() if deltas is None else deltas.by_layer.get(index, SublayerDeltas())

    def _is_measured(self, layer: int) -> bool:
        return self.drift_N is not None and layer in self.memory.probe_layers

    def _spans(self, layers: range, run: PackedRun) -> Iterable[range]:
        """The layers of a run that may be run in one call. Those whose drift is measured are apart from the others, and
        from one another where some rows reuse their deltas.
        """
        measured = [self._is_measured(layer) for layer in layers]
        edges = {
            layers.start + place
            for place, (before, after) in enumerate(pairwise(measured), start=1)
            if before != after or (after and not run.is_whole)
        }
        return (range(*span) for span in pairwise(sorted({layers.start, layers.stop, *edges})))

    def _run_together(self, layers: range, run: PackedRun) -> bool:
        """Runs these layers in one call, if the backend can and nobody watches a delta. Drift is measured after they
        ran, against the deltas they had before. False: nothing has changed.
        """
        memory, ran, before = self.memory, run.mlp.ran, None
        if self.model.packed_layers is None or memory.observe is not None or self.packer.drafting is not None:
            return False
        if self._is_measured(layers.start):
            if not run.is_whole or memory.deltas is None or ran.deltas is None:
                return False
            before = memory.deltas.read(layers, ran.deltas)
        model, h_ND = self.model, self.stream.settled()
        going = self.backend.run_layers(model.packed_layers, layers, h_ND, run, memory.cache, memory.deltas)
        if going is None:
            return False
        self.going, self.stream.h_ND = run.kept, going
        written = 0 if run.written is None else run.written.rows.size
        self.executed.count(len(layers), attention=run.attention.ran.size, keys_values=written, mlp=ran.size)
        if before is not None and memory.deltas is not None and ran.deltas is not None:
            self._note_drift(_relative_change(memory.deltas.read(layers, ran.deltas), before).amax((0, 1)), ran)
        return True

    def _note_drift(self, drift: Tensor, rows: RowSubset) -> None:
        """Raises the drift of some of the rows that go on, or of all. Which had a valid delta, the caller knows. Rows
        that do not go on have no drift.
        """
        assert self.drift_N is not None
        going = self.going
        if going is not None:
            self.drift_N = torch.full_like(self.drift_N, nan).index_copy_(0, going, self.drift_N[going])
        index = rows.indices if going is None else going if rows.indices is None else going[rows.indices]
        if index is None:
            torch.maximum(self.drift_N, drift, out=self.drift_N)
        else:
            self.drift_N[index] = torch.maximum(self.drift_N[index], drift)


def _relative_change(delta: Tensor, before: Tensor) -> Tensor:
    return (torch.linalg.vector_norm(delta - before, dim=-1) / torch.linalg.vector_norm(delta, dim=-1)).float()
