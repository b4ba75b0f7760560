"""The contract of a reuse rule, and the passes that turn a view into a plan."""

from typing import ClassVar, Protocol, cast

from stepsaver.engine import registry
from stepsaver.engine.plan import StepPlan, whole_plan
from stepsaver.engine.rows import first_row, rows_between
from stepsaver.engine.view import StepView


class ReuseRule(Protocol):
    """A frozen dataclass: its fields are hyper-parameters and identity."""

    name: ClassVar[str]
    exact: ClassVar[bool]  # exact in real arithmetic: the same tokens in float64 as without the rule

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        """The plan with less work. Never more: `plan_step` asserts it."""
        ...

    def delta_layers(self, layers: int) -> frozenset[int]:
        """The layers, of so many, whose deltas the rule may reuse and the engine therefore keeps."""
        ...


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
    """The plan of a sample's next denoising step: the base plan, narrowed by each rule in turn."""
    plan = base_plan(view)
    for rule in rules:
        narrowed = rule.narrow(plan, view)
        assert narrowed <= plan, f"{rule} added work: {narrowed} is not within {plan}"
        plan = narrowed
    return plan


def parse_rule(text: str) -> ReuseRule:
    """A rule from `name:field=value,...`."""
    return cast(ReuseRule, registry.parse(text, "stepsaver.engine.reuse", "rule"))
