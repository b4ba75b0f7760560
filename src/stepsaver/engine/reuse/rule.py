"""The contract of a reuse rule, and the passes that turn a view into a plan."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, cast

from stepsaver.engine import registry
from stepsaver.engine.decoding import Decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import StepPlan, whole_plan
from stepsaver.engine.rows import first_row, rows_between
from stepsaver.engine.trace import SampleStep
from stepsaver.engine.view import StepView


class Shares(NamedTuple):
    """Of a step's row-layers, how much may be left out: 0 nothing, 1 everything."""

    attention: float = 0.0
    keys_values: float = 0.0
    mlp: float = 0.0


class ReuseRule(ABC):
    """A frozen dataclass: its fields are hyper-parameters and identity. It only ever takes work away from a plan."""

    name: ClassVar[str]
    exact: ClassVar[bool] = False  # exact in real arithmetic: the same tokens in float64 as without the rule
    needs_block_cache: ClassVar[bool] = True  # without one every row runs in every step and there is nothing to keep

    @abstractmethod
    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        """The plan with less work. Never more: `plan_step` asserts it."""

    def delta_layers(self, layers: int) -> frozenset[int]:
        """The layers, of so many, whose deltas the rule may reuse and the engine therefore keeps."""
        return frozenset()

    def probe_layers(self, layers: int) -> frozenset[int]:
        """The layers whose drift the rule wants to know."""
        return frozenset()

    def narrow_after_probe(self, plan: StepPlan, view: StepView, layer: int) -> StepPlan:
        """Asked when the plan's `ask_after` layer has run: may take away work of the layers behind it."""
        return plan

    @abstractmethod
    def reusable(self, step: SampleStep, decoding: Decoding, layers: int) -> Shares:
        """At most how much of a step, as it runs without rules, this rule could ever leave out: its ceiling."""

    def check(self, layers: int) -> None:  # noqa: B027 (most rules fit every model)
        """Says what is impossible for a model of so many layers."""


def base_plan(view: StepView) -> StepPlan:
    """The step without reuse: the sub-block if the block cache can serve the other rows, else the whole block.

    The row before a masked row predicts it. A sub-block whose first row is masked therefore needs a row outside itself,
    which is why the reference runs the whole block then.
    """
    start = first_row(view.sub_block)
    reads = view.candidates >> 1
    serves = view.block_cache and view.step > 0 and not view.masked >> start & 1
    if serves:
        return whole_plan("sub", window=view.sub_block, reads=reads, layers=view.layers)
    return whole_plan("full", window=rows_between(0, view.block_size), reads=reads, layers=view.layers)


def plan_step(view: StepView, rules: tuple[ReuseRule, ...]) -> StepPlan:
    """The plan of a sample's next denoising step: the base plan, narrowed by each rule in turn, left to right."""
    plan = base_plan(view)
    for rule in rules:
        if plan.is_empty:
            break
        narrowed = rule.narrow(plan, view)
        assert narrowed <= plan, f"{rule} added work: {narrowed} is not within {plan}"
        plan = narrowed
    return plan


def plan_rest(plan: StepPlan, view: StepView, rules: tuple[ReuseRule, ...]) -> StepPlan:
    """The plan for the layers behind `plan.ask_after`, now that the drift of the layers before is known."""
    layer = plan.ask_after
    assert layer is not None
    for rule in rules:
        narrowed = rule.narrow_after_probe(plan, view, layer)
        assert narrowed <= plan, f"{rule} added work: {narrowed} is not within {plan}"
        assert narrowed.layers[: layer + 1] == plan.layers[: layer + 1], f"{rule} changed layers that have run"
        plan = narrowed
    return plan


def parse_rule(text: str) -> ReuseRule:
    """A rule from `name:field=value,...`."""
    return cast(ReuseRule, registry.parse(text, "stepsaver.engine.reuse", "rule"))


def check_rules(rules: tuple[ReuseRule, ...], decoding: Decoding, layers: int) -> None:
    """Refuses combinations that cannot work, in one line."""
    for rule in rules:
        if rule.needs_block_cache and not decoding.block_cache:
            raise UsageError(f"rule {rule.name} needs the block cache, which is off")
        rule.check(layers)
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"rule {twice} is given twice; one of each kind can be combined")
