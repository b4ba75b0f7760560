"""The loop over layers. There is one: prefills, denoising steps and commits of all samples run through it.

The rows of all samples are packed into one matrix, so every projection is one matrix multiplication, whatever state the
samples are in. Consecutive layers that run the same rows share their index tensors (`packing.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from stepsaver.engine.attention import mix
from stepsaver.engine.backends.cpu.layers import (
    KeptDeltas,
    LayerStack,
    RowsOfParts,
    Some,
    run_layers,
    run_reused_layers,
)
from stepsaver.engine.cache import DeltaCache, KeyValueCache, keep_deltas
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.models.transformer import Attention, Layer, Transformer
from stepsaver.engine.packing import PackedRun, Packer, PartRows, Step, Subset, pack_rows, run_end
from stepsaver.engine.stream import Stream
from stepsaver.engine.threads import require_own_threads

PartName = Literal["attention", "mlp"]


class Memory(NamedTuple):
    """What a forward reads and writes in addition to its rows."""

    cache: KeyValueCache
    deltas: DeltaCache | None
    rotations: Rotation  # of all positions
    probe_layers: frozenset[int] = frozenset()  # whose drift is measured
    observe: "Observe | None" = None


# Gets each part's delta of the rows that ran: layer, part, delta, and the steps that the rows belong to.
Observe = Callable[[int, PartName, Tensor, Sequence[Step]], None]
Ask = Callable[[Sequence[Step], Tensor], Sequence[Step]]


@dataclass
class Executed:
    """What the parts did, counted from their input tensors: row-layers, and layers that ran on any row."""

    attention: int = 0
    keys_values: int = 0
    mlp: int = 0
    head: int = 0
    attention_layers: int = 0
    keys_values_layers: int = 0
    mlp_layers: int = 0

    def count(self, part: PartName, rows: int) -> None:
        if part == "attention":
            self.attention += rows
            self.attention_layers += 1
        else:
            self.mlp += rows
            self.mlp_layers += 1

    def count_layers(self, layers: int, *, written: int, attention: int, mlp: int) -> None:
        """Some layers, each with so many rows that write keys and values, attend, and run the MLP."""
        self.attention += attention * layers
        self.keys_values += written * layers
        self.mlp += mlp * layers
        self.attention_layers += layers if attention else 0
        self.keys_values_layers += layers if written else 0
        self.mlp_layers += layers if mlp else 0

    def count_keys_values(self, rows: int) -> None:
        self.keys_values += rows
        self.keys_values_layers += 1


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
    rows = pack_rows(steps, model.device)
    packer = Packer(rows, rotation=memory.rotations[rows.positions], cache=memory.cache, deltas=memory.deltas)
    forward = Forward(memory, Stream(model.embedding(rows.tokens)), steps)
    layers = tuple(model.layers)
    first = 0
    while first < len(layers):
        last = run_end(forward.steps, first)
        run = packer.run(forward.steps, first)
        for start, stop in forward.spans(first, last, run):
            if not forward.run_stack(model.stack, start, stop, run):
                for index in range(start, stop):
                    forward.run_layer(cast(Layer, layers[index]), index, run)
        if ask is not None and any(step.plan.ask_after == last - 1 for step in forward.steps):
            assert forward.drift_N is not None, "a plan asks for a drift that nobody measures"
            forward.steps = ask(forward.steps, forward.drift_N)
        first = last
    return StepOutput(forward.logits(model), forward.executed, forward.drift_N, forward.steps)


class Forward:
    """The state of a forward between layers."""

    def __init__(self, memory: Memory, stream: Stream, steps: Sequence[Step]) -> None:
        self.memory = memory
        self.stream = stream
        self.steps = steps
        self.executed = Executed()
        self.drift_N: Tensor | None = None
        if memory.probe_layers and memory.deltas is not None:
            self.drift_N = torch.zeros(len(stream.h_ND), dtype=torch.float32, device=stream.h_ND.device)

    def run_layer(self, layer: Layer, index: int, run: PackedRun) -> None:
        """Project, mix, add, MLP, add. What a plan leaves out is added from the delta cache."""
        attention, mlp = layer.parts
        mixed = self._mix(attention, index, run)
        self.stream.keep(run.kept)
        self._add("attention", index, None if mixed is None else attention.finish(mixed), run)
        delta = self.stream.through(mlp, run.mlp.ran) if run.mlp.ran.size else None
        self._add("mlp", index, delta, run)

    def spans(self, first: int, last: int, run: PackedRun) -> Iterable[tuple[int, int]]:
        """The layers of a run that can be run in one call. Those whose drift is measured are apart from the others, and
        from one another where some rows reuse their deltas.
        """
        measured = [self._is_measured(layer) for layer in range(first, last)]
        edges = {
            first + place
            for place, (before, after) in enumerate(pairwise(measured), start=1)
            if before != after or (after and not run.is_whole)
        }
        return pairwise(sorted({first, last, *edges}))

    def _is_measured(self, layer: int) -> bool:
        return self.drift_N is not None and layer in self.memory.probe_layers

    def run_stack(self, stack: LayerStack | None, first: int, last: int, run: PackedRun) -> bool:
        """Runs all layers of a run in one call. That needs weights in blocks, contexts that our own kernel attends, and
        nobody who watches a delta; and rows that all run everything, or small layers before the last one whose deltas
        are kept. Otherwise it does nothing and returns False.
        """
        memory, attending, is_measured = self.memory, run.attending, self._is_measured(first)
        if stack is None or attending.alone or attending.grouped or memory.observe is not None:
            return False
        if run.is_whole and not is_measured:
            return self._run_whole(stack, first, last, run)
        if memory.deltas is None or run.kept is not None or not memory.deltas.has(first, last):
            return False
        if run.is_whole:
            return self._run_measured(stack, first, last, run, memory.deltas)
        return not (stack.is_large or is_measured) and self._run_reused(stack, first, last, run, memory.deltas)

    def _run_whole(self, stack: LayerStack, first: int, last: int, run: PackedRun) -> bool:
        memory, segments, cache_rows = self.memory, run.attending.by_kernel, run.cache_rows
        assert segments is not None
        assert cache_rows is not None
        deltas = None
        if memory.deltas is not None:
            deltas = KeptDeltas(memory.deltas.addresses, run.mlp.ran_delta_index)
        h_ND, rotation = self.stream.settled(), run.keys_values_rotation
        going = run_layers(
            stack, first, last, h_ND, rotation, memory.cache.stored, cache_rows, segments, kept=run.kept, deltas=deltas
        )
        if going is None:
            return False
        self.stream.h_ND = going
        self.executed.count_layers(last - first, written=len(h_ND), attention=len(going), mlp=len(going))
        return True

    def _run_measured(self, stack: LayerStack, first: int, last: int, run: PackedRun, deltas: DeltaCache) -> bool:
        """The drift of all these layers is measured after they ran, against the deltas they had before."""
        before = deltas.read(first, last, run.mlp.ran_delta_index)
        if not self._run_whole(stack, first, last, run):
            return False
        drift = _relative_change(deltas.read(first, last, run.mlp.ran_delta_index), before)
        self._note_drift(drift.amax((0, 1)), run.mlp.ran, None)
        return True

    def _note_drift(self, drift: Tensor, rows: Subset, kept: Tensor | None) -> None:
        """Raises the drift of some of the rows that go on, or of all. Which had a valid delta, the caller knows. Rows
        that do not go on have no drift.
        """
        assert self.drift_N is not None
        if kept is not None:
            self.drift_N = torch.full_like(self.drift_N, nan).index_copy_(0, kept, self.drift_N[kept])
        index = rows.indices if kept is None else kept if rows.indices is None else kept[rows.indices]
        if index is None:
            torch.maximum(self.drift_N, drift, out=self.drift_N)
        else:
            self.drift_N[index] = torch.maximum(self.drift_N[index], drift)

    def _run_reused(self, stack: LayerStack, first: int, last: int, run: PackedRun, deltas: DeltaCache) -> bool:
        attention, mlp = run.attention, run.mlp
        parts = RowsOfParts(
            Some(run.keys_values.indices, None, run.keys_values.size),
            Some(attention.ran.indices, attention.ran_delta_index, attention.ran.size),
            Some(mlp.ran.indices, mlp.ran_delta_index, mlp.ran.size),
            Some(attention.reused.indices, attention.reused_delta_index, attention.reused.size),
            Some(mlp.reused.indices, mlp.reused_delta_index, mlp.reused.size),
        )
        has_run = run_reused_layers(
            stack,
            first,
            last,
            self.stream.settled(),
            parts,
            (run.keys_values_rotation, run.query_rotation),
            self.memory.cache.stored,
            run.cache_rows,
            run.attending.by_kernel,
            deltas.addresses,
        )
        if has_run:
            written, attending, thinking = run.keys_values.size, attention.ran.size, mlp.ran.size
            self.executed.count_layers(last - first, written=written, attention=attending, mlp=thinking)
        return has_run

    def _mix(self, attention: Attention, index: int, run: PackedRun) -> Tensor | None:
        """Rewrites keys and values, and mixes the queries. Returns None if there are no queries."""
        cache, norms = self.memory.cache, attention.head_norms
        if run.is_fused:
            projected = self.stream.through(attention.project, run.queries)
            self.executed.count_keys_values(projected.shape[0])
            return mix(
                projected, run.query_rotation, cache, index, norms, cache_rows=run.cache_rows, attending=run.attending
            )
        if run.cache_rows is not None:
            projected = self.stream.through(attention.project_keys_values, run.keys_values)
            mix(projected, run.keys_values_rotation, cache, index, norms, cache_rows=run.cache_rows)
            self.executed.count_keys_values(projected.shape[0])
        if not run.queries.size:
            return None
        projected = self.stream.through(attention.project_queries, run.queries)
        return mix(projected, run.query_rotation, cache, index, norms, attending=run.attending)

    def _add(self, name: PartName, index: int, delta: Tensor | None, run: PackedRun) -> None:
        """Adds a part's delta: new for the rows that ran, cached for the other rows. Keeps the new ones."""
        part: PartRows = getattr(run, name)
        stored = None
        if self.memory.deltas is not None and index in self.memory.deltas.by_layer:
            stored = getattr(self.memory.deltas.by_layer[index], name)
        if delta is not None:
            self.executed.count(name, delta.shape[0])
            if self.memory.observe is not None:
                self.memory.observe(index, name, delta, self.steps)
            self.stream.add(delta, part.ran)
            if stored is not None:
                if self._is_measured(index):
                    self._note_drift(_relative_change(delta, stored[part.ran_delta_index]), part.ran, run.kept)
                keep_deltas(stored, part.ran_delta_index, delta)
        if part.reused.size:
            assert stored is not None, "a plan reuses a layer whose deltas nobody keeps"
            self.stream.add(stored[part.reused_delta_index], part.reused)

    def logits(self, model: Transformer) -> Tensor:
        """The logits of the rows that are read, sample by sample."""
        rows = self.stream.h_ND.shape[0]
        self.executed.head += rows
        if not rows:
            return self.stream.h_ND.new_empty((0, model.config.vocab))
        return self.stream.through(model.logits, Subset(None, rows))


def _relative_change(delta: Tensor, before: Tensor) -> Tensor:
    return (torch.linalg.vector_norm(delta - before, dim=-1) / torch.linalg.vector_norm(delta, dim=-1)).float()
