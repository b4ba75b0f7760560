"""Adaptive skip over layers: a few layers always run and show whether the others have to run."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import LayerPositions, StepPlan
from stepsaver.engine.positions import position_sets
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class AdaptiveLayers(Rule):
    """Positions whose drift in the probe layers stays small reuse the deltas of all other layers.

    Source: the adaptive skip that the experiment log proposes. It follows caches of image diffusion that skip a whole
    step (TeaCache, Liu et al., 2024); here each position is decided separately. The first `probe` layers always run and
    measure the drift of unchanged positions. The other layers reuse a position's deltas while its drift, added up since
    all its layers last ran, stays under `threshold`, and while they were reused fewer than `max_age` times without a
    break.
    """

    name: ClassVar[str] = "adaptive_layers"
    purpose: ClassVar[str] = "skip layers for positions whose input hardly moved, as a few probe layers measure it"

    probe: int = 4
    threshold: float = field(default=0.1, metadata=tuned(0.1, 0.3))
    max_age: int = 3

    def __post_init__(self) -> None:
        if self.probe < 1:
            raise UsageError(f"rule adaptive_layers: probe {self.probe} is not positive")
        if not self.threshold >= 0:
            raise UsageError(f"rule adaptive_layers: threshold {self.threshold} is negative")
        if self.max_age < 1:
            raise UsageError(f"rule adaptive_layers: max_age {self.max_age} is not positive")

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        if self.probe >= layers:
            raise UsageError(f"rule adaptive_layers: probe {self.probe} leaves no layer of {layers} to skip")

    def delta_layers(self, layers: int) -> frozenset[int]:
        return frozenset(range(self.probe, layers)) if self.threshold else frozenset()

    def probe_layers(self, layers: int) -> frozenset[int]:
        return frozenset(range(self.probe)) if self.threshold else frozenset()

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        if view.step == 0 or not self.threshold:
            return plan
        return replace(plan, ask_after=self.probe - 1)

    def narrow_after_probe(self, plan: StepPlan, view: StepView, layer: int) -> StepPlan:
        calm = (view.drift_since_run < self.threshold) & (view.drift >= 0)
        stamps, ages = view.stamps.sublayers[::2, self.probe :], view.ages.sublayers[:, self.probe :]
        fit = calm & ((stamps == view.tokens) & (ages < self.max_age)).all(axis=0)
        rest = (
            LayerPositions(each.attention & ~positions, each.keys_values, each.mlp & ~positions)
            for each, positions in zip(plan.layers[self.probe :], position_sets(fit), strict=True)
        )
        return replace(plan, layers=(*plan.layers[: self.probe], *rest))
