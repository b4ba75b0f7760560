"""Layer reuse: a group of layers runs only every k-th time."""

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import LayerPositions, StepPlan, empty_plan
from stepsaver.engine.positions import Positions, position_set, position_sets
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView

# `first`, `middle` and `last` are the groups of the source's experiment: its model had 28 layers, each group 12.
SOURCE_LAYERS, SOURCE_GROUP = 28, 12
GROUP_NAMES = ("first", "middle", "last", "thirds:1", "thirds:2", "thirds:3", "all")


def group_size(layers: int) -> int:
    """How many layers `first`, `middle` and `last` have: the same share of the depth as in the source."""
    return max(1, round(SOURCE_GROUP * layers / SOURCE_LAYERS))


@lru_cache(maxsize=256)
def layer_group(text: str, layers: int) -> frozenset[int]:
    """The layers of a group in a model of `layers` layers.

    At the source's depth, `first`, `middle` and `last` are what its code really chose: 1-12, 8-19 and 16-27, which
    overlap. They are scaled to other depths. The thirds are equal and disjoint. If the depth is not a multiple of
    three, the last one or two layers are in none of them.
    """
    size = group_size(layers)
    third = layers // 3
    starts = {
        "first": (min(1, layers - size), size),
        "middle": ((layers - size) // 2, size),
        "last": (layers - size, size),
        "thirds:1": (0, third),
        "thirds:2": (third, third),
        "thirds:3": (2 * third, third),
        "all": (0, layers),
    }
    if text in starts:
        start, count = starts[text]
        if not count:
            raise UsageError(f"layers {text!r}: a model of {layers} layer{'s' * (layers > 1)} has no thirds")
        return frozenset(range(start, min(start + count, layers)))
    return _explicit(text, layers)


def check_group_name(text: str) -> None:
    """Refuses a name that is wrong for every depth."""
    if text not in GROUP_NAMES:
        _ranges(text)


def _explicit(text: str, layers: int) -> frozenset[int]:
    chosen: set[int] = set()
    for item, first, last in _ranges(text):
        if last >= layers:
            raise UsageError(f"layers {text!r}: {item!r} is not within 0-{layers - 1}")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def _ranges(text: str) -> list[tuple[str, int, int]]:
    """Each item of `4-9,12` with its first and last layer."""
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise UsageError(
                f"layers {text!r}: {item!r} is no range; allowed: {', '.join(GROUP_NAMES)}, or like 4-9,12"
            )
        found.append((item, int(match[1]), int(match[2] or match[1])))
    return found


@dataclass(frozen=True)
class LayerReuse(Rule):
    """The source's layer reuse, in its own semantics and in two that carry information.

    Source: the 3x3 grid of experiment 00_baseline (k = 1, 2, 3 on the first, middle or last 12 layers).
    `output` is what the source computed: the group returns its cached absolute output. Every layer after the group
    then sees its old input, so the step's logits are the last ones, whatever the group. Such a step really needs no
    forward at all. It acts on sub-block steps whose index is not a multiple of k.
    `delta` is different: a position adds the group's cached deltas to its new residual stream if it is unchanged and
    has reused them fewer than k - 1 times without a break. `mlp` does so only for the MLP; attention always runs. `kv`
    says whether positions that reuse a layer's deltas rewrite its keys and values (`refresh`) or keep them (`freeze`).
    """

    name: ClassVar[str] = "layer_reuse"
    purpose: ClassVar[str] = (
        "repeat the source's experiment, and show what reusing outputs, deltas or MLPs of some layers does"
    )

    k: int = field(metadata=tuned(2, 3))
    layers: str = field(default="last", metadata=tuned("last", "middle", "first", is_ordered=False))
    mode: Literal["output", "delta", "mlp"] = field(
        default="delta", metadata=tuned("mlp", "delta", "output", is_ordered=False)
    )
    kv: Literal["refresh", "freeze"] = field(default="refresh", metadata=tuned("refresh", "freeze"))

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"rule layer_reuse: k {self.k} is not positive")
        if self.kv == "freeze" and self.mode != "delta":
            raise UsageError(f"rule layer_reuse: kv=freeze belongs to mode=delta, not to mode={self.mode}")
        check_group_name(self.layers)

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        layer_group(self.layers, layers)

    def delta_layers(self, layers: int) -> frozenset[int]:
        if self.mode == "output" or self.k == 1:
            return frozenset()
        return layer_group(self.layers, layers)

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        if self.k == 1:
            return plan
        if self.mode == "output":
            is_reused = plan.kind == "sub" and view.step % self.k and view.is_proposed(view.candidates)
            return empty_plan(view.layers) if is_reused else plan
        return _without(plan, view.layers, self.layers, self._reusable(view), self.mode == "mlp", self.kv == "freeze")

    def _reusable(self, view: StepView) -> tuple[Positions, ...]:
        """Per layer of the group, the positions that are unchanged and young enough."""
        group = sorted(layer_group(self.layers, view.layers))
        fit = (view.stamps.mlp[group] == view.tokens) & (view.ages.mlp[group] < self.k - 1)
        if self.mode == "delta":
            fit &= (view.stamps.attention[group] == view.tokens) & (view.ages.attention[group] < self.k - 1)
        if (fit[1:] == fit[:-1]).all():  # true of most steps: layers of a group run and reuse the same positions
            return (position_set(fit[0]),) * len(group)
        return tuple(position_sets(fit))


@lru_cache(maxsize=65536)
def _without(
    plan: StepPlan, layers: int, group: str, reusable: tuple[Positions, ...], mlp_only: bool, freeze: bool
) -> StepPlan:
    """The plan with the group's deltas of the reusable positions taken from the cache."""
    changed = list(plan.layers)
    for layer, positions in zip(sorted(layer_group(group, layers)), reusable, strict=True):
        each = changed[layer]
        changed[layer] = LayerPositions(
            attention=each.attention if mlp_only else each.attention & ~positions,
            keys_values=each.keys_values & ~positions if freeze else each.keys_values,
            mlp=each.mlp & ~positions,
        )
    return replace(plan, layers=tuple(changed))
