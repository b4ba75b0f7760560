"""The contract of a reuse rule, and the functions that turn a view into a plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar, cast

from stepsaver.engine import registry
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.plan import StepPlan, commit_plan, whole_plan
from stepsaver.engine.plugins import plugin_problem, raise_fault
from stepsaver.engine.positions import is_subset, positions_between
from stepsaver.engine.view import StepView


class Rule(ABC):
    """Takes work away from a plan. A frozen dataclass; its fields are its hyper-parameters and identify it.

    A rule has to have a name and `narrow`. Everything else says what it needs, and is nothing if it does not say so.
    """

    name: ClassVar[str]
    purpose: ClassVar[str] = ""  # what it is for, in a line
    needs_shift: ClassVar[bool] = False  # only works if positions predict the token after them
    needs_block_cache: ClassVar[bool] = (
        True  # without one, every step runs every position and there is nothing to reuse
    )

    @abstractmethod
    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        """The plan with less work. Never more: `plan_step` asserts it."""

    def narrow_commit(self, plan: StepPlan, view: StepView) -> StepPlan:
        """The commit with less work. Most rules leave it as it is, so that the context stays exact."""
        return plan

    def delta_layers(self, layers: int) -> frozenset[int]:
        """Which of `layers` layers the engine has to keep deltas of, because the rule may reuse them."""
        return frozenset()

    def probe_layers(self, layers: int) -> frozenset[int]:
        """Which of `layers` layers the engine has to measure the drift of."""
        return frozenset()

    def narrow_after_probe(self, plan: StepPlan, view: StepView, layer: int) -> StepPlan:
        """Called when the plan's `ask_after` layer has run. May take work away from the layers after it."""
        return plan

    def check(self, decoding: DecodingSettings, layers: int) -> None:  # noqa: B027 (most rules fit every model)
        """Refuses settings that are impossible with this way of decoding, or for a model of `layers` layers."""


def base_plan(view: StepView) -> StepPlan:
    """A denoising step. It runs the sub-block if the block cache can serve the other positions, else the block."""
    reads = view.prediction.readers(view.candidates)
    if cache_serves(view):
        return whole_plan("sub", window=view.sub_block, reads=reads, layers=view.layers, prediction=view.prediction)
    window = positions_between(0, view.block_size)
    return whole_plan("full", window=window, reads=reads, layers=view.layers, prediction=view.prediction)


def cache_serves(view: StepView) -> bool:
    """Whether a step can run the sub-block alone, with the positions around it from the cache.

    A sub-block's first step cannot: positions outside the sub-block have changed. Also, all positions that predict a
    candidate must be in the sub-block. Where a position predicts the token after it, this fails while the sub-block's
    first position is masked. That is why the reference runs the whole block then.
    """
    return (
        view.block_cache
        and view.steps_in_sub_block > 0
        and view.sub_block_size < view.block_size
        and is_subset(view.prediction.readers(view.candidates), view.sub_block)
    )


def plan_step(view: StepView, rules: tuple[Rule, ...]) -> StepPlan:
    """The plan of a sample's next denoising step: the base plan, narrowed by each rule from left to right."""
    plan = base_plan(view)
    for rule in rules:
        if plan.is_empty:
            break
        plan = _less(rule, rule.narrow, plan, view)
    return plan


def plan_commit(view: StepView, rules: tuple[Rule, ...]) -> StepPlan:
    """The plan of a finished block's commit: all positions but those that a rule lets keep their keys and values."""
    plan = commit_plan(view.block_size, layers=view.layers, prediction=view.prediction)
    for rule in rules:
        plan = _less(rule, rule.narrow_commit, plan, view)
    return plan


def plan_rest(plan: StepPlan, view: StepView, rules: tuple[Rule, ...]) -> StepPlan:
    """The plan for the layers after `plan.ask_after`, now that the drift up to there is known."""
    layer = plan.ask_after
    assert layer is not None
    for rule in rules:
        plan = _less(rule, rule.narrow_after_probe, plan, view, layer)
    return plan


def _less(rule: Rule, narrow: Callable[..., StepPlan], plan: StepPlan, view: StepView, *layer: int) -> StepPlan:
    """What a rule makes of a plan. After a probe `layer`, the layers up to it have run."""
    try:
        narrowed = narrow(plan, view, *layer)
        assert isinstance(narrowed, StepPlan), f"it returned {shown(narrowed)}, which is no plan"
        assert narrowed is plan or _is_within(narrowed, plan), f"added work: {narrowed} is not within {plan}"
        for each in layer:
            assert narrowed.layers[: each + 1] == plan.layers[: each + 1], "changed layers that have run"
    except Exception as error:
        raise_fault("rule", rule, error)
    return narrowed


@lru_cache(maxsize=65536)  # the same pairs come again and again
def _is_within(narrowed: StepPlan, plan: StepPlan) -> bool:
    return narrowed <= plan


def parse_rule(text: str) -> Rule:
    """A rule from `name:field=value,...`."""
    made = registry.parse(text, "stepsaver.engine.rules", "rule")
    rule_class(type(made))
    return cast(Rule, made)


def rule_class(made: type) -> type[Rule]:
    """Checks that a class of the registry is a rule: other packages may declare anything."""
    if not issubclass(made, Rule):
        raise plugin_problem("stepsaver.rules", vars(made)["name"], "a Rule")
    return made


def chosen_rules(given: "str | Rule | Sequence[str | Rule]") -> tuple[Rule, ...]:
    """The rules that Python code chose: text or objects, one or several."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for each in listed:
        if not isinstance(each, (str, Rule)):
            raise UsageError(f"{shown(each)} is no rule: expected text such as 'trim:level=changed', or a Rule object")
    return tuple(parse_rule(each) if isinstance(each, str) else each for each in listed)


def check_rules(rules: tuple[Rule, ...], decoding: DecodingSettings, layers: int) -> None:
    """Refuses rules that cannot work with this model or with each other."""
    for rule in rules:
        try:
            _check_needs(rule, decoding)
            rule.check(decoding, layers)
            assert rule.delta_layers(layers) | rule.probe_layers(layers) <= {*range(layers)}, "its layers are not there"
        except UsageError:
            raise
        except Exception as error:
            raise_fault("rule", rule, error)
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"rule {twice} is given twice; one of each kind can be combined")


def _check_needs(rule: Rule, decoding: DecodingSettings) -> None:
    if rule.needs_shift and not decoding.prediction.shift:
        raise UsageError(
            f"rule {rule.name} needs positions that predict the token after them, and here each predicts its own"
        )
    if decoding.prediction.has_causal_context and type(rule).narrow_commit is not Rule.narrow_commit:
        raise UsageError(
            f"rule {rule.name} lets commits keep keys and values of steps, and here only causal ones are context"
        )
    if rule.needs_block_cache and not decoding.block_cache:
        raise UsageError(f"rule {rule.name} needs the block cache, which is off")
