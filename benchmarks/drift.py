"""How much a row's deltas drift from step to step: per layer, age and kind of row, without any reuse.

Drift is the relative change of a delta, |new - old| / |new|. Age is the number of steps between the two. Drift tells
which layers of a model are safe to reuse, before anything is reused.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Sublayer
from stepsaver.engine.packing import Step
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import position_index
from stepsaver.engine.rules.layer_reuse import group_size
from stepsaver.engine.trace import COMPUTED_STEPS

KINDS = ("masked", "just unmasked", "unmasked earlier")
PARTS: tuple[Sublayer, ...] = ("attention", "mlp")


class Snapshot(NamedTuple):
    """A block's rows in one step: which ones were in the window, their tokens, and their deltas of one part."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    deltas: Tensor


@dataclass
class DriftRecorder:
    """An observer of the engine that compares every delta with those of the same row in earlier steps of its block."""

    layers: int
    max_age: int
    mask_id: int
    totals: NDArray[np.float64] = field(init=False)  # [parts, layers, ages, kinds]
    counts: NDArray[np.int64] = field(init=False)
    history: dict[tuple[int, Sublayer, int], tuple[int, deque[Snapshot]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(PARTS), self.layers, self.max_age, len(KINDS))
        self.totals, self.counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)

    def observe(self, layer: int, part: Sublayer, delta: Tensor, steps: Sequence[Step]) -> None:
        if layer == self.layers - 1:  # beyond its keys and values only a few rows run in the last layer
            return
        start = 0
        for step in steps:
            count = step.plan.positions
            if step.plan.kind in COMPUTED_STEPS:
                rows = position_index(step.plan.window)
                snapshot = Snapshot(rows, step.tokens[rows].copy(), delta[start : start + count].clone())
                self._compare(layer, part, step, snapshot)
            start += count

    def _compare(self, layer: int, part: Sublayer, step: Step, now: Snapshot) -> None:
        key = (step.slot, part, layer)
        start, earlier = self.history.get(key, (-1, deque[Snapshot]()))
        if start != step.start:
            earlier = deque(maxlen=self.max_age)
            self.history[key] = (step.start, earlier)
        for age, then in enumerate(reversed(earlier)):
            both, here, there = np.intersect1d(now.rows, then.rows, assume_unique=True, return_indices=True)
            if len(both):
                new, old = now.deltas[here], then.deltas[there]
                drift = torch.linalg.vector_norm(new - old, dim=-1) / torch.linalg.vector_norm(new, dim=-1)
                self._add(part, layer, age, drift.double().cpu().numpy(), now.tokens[here], then.tokens[there])
        earlier.append(now)

    def _add(self, part: Sublayer, layer: int, age: int, drift: NDArray, tokens: NDArray, before: NDArray) -> None:
        masked, was_masked = tokens == self.mask_id, before == self.mask_id
        for kind, chosen in enumerate((masked, ~masked & was_masked, ~masked & ~was_masked)):
            finite = chosen & np.isfinite(drift)
            self.totals[PARTS.index(part), layer, age, kind] += drift[finite].sum()
            self.counts[PARTS.index(part), layer, age, kind] += finite.sum()

    def means(self) -> NDArray[np.float64]:
        """Returns the mean drift, NaN where nothing was seen."""
        with np.errstate(invalid="ignore"):
            return np.where(self.counts, self.totals / np.maximum(self.counts, 1), np.nan)


def calibrate(engine: Engine, prompts: Sequence[Prompt], *, max_new_tokens: int, max_age: int = 4) -> dict[str, Any]:
    """Decodes the prompts without reuse and returns the drift table and a proposed group of layers."""
    layers = engine.model.config.layers
    recorder = DriftRecorder(layers, max_age, engine.decoding.mask_id)
    watched = Engine(
        engine.model,
        decoder=Denoise(engine.decoder.policy or Threshold()),
        batch_size=engine.batch_size,
        decoding=engine.decoding,
        observe=recorder.observe,
    )
    for _ in watched.generate(prompts, max_new_tokens=max_new_tokens):
        pass
    if not recorder.counts.any():
        raise UsageError("no block took a second step, so there is no drift to measure: try longer texts or blocks")
    means = recorder.means()
    return {
        "layers": layers,
        "ages": list(range(1, max_age + 1)),
        "kinds": list(KINDS),
        "drift": {part: means[index].round(6).tolist() for index, part in enumerate(PARTS)},
        "rows_seen": {part: recorder.counts[index].tolist() for index, part in enumerate(PARTS)},
        "calibrated": proposed_layers(means, group_size(layers)),
        "groups": [proposed_layers(means, size) for size in proposed_sizes(layers)],
    }


def proposed_sizes(layers: int) -> list[int]:
    """Returns a quarter, a half and three quarters of the layers: the group sizes that a tuning tries."""
    return sorted({max(1, round(share * layers)) for share in (0.25, 0.5, 0.75)})


def proposed_layers(means: NDArray[np.float64], size: int) -> str:
    """Returns the `size` layers whose unchanged rows drift least from step to step, as text such as `3-7,9`."""
    layers = means.shape[1]
    unchanged = np.nanmean(means[:, : layers - 1, 0][..., [0, 2]], axis=(0, 2))
    chosen = sorted(np.argsort(unchanged, kind="stable")[:size].tolist())
    return ",".join(_ranges(chosen))


def _ranges(numbers: list[int]) -> list[str]:
    groups: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(numbers):
        groups[number - index].append(number)
    return [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups.values()]
