"""The exact positions that each rule leaves to run, for every field at two values, on views written by hand.

A new rule adds its lines to `WINDOWS` or, if it acts on single layers, a table of its own. Blocks have eight positions,
sub-blocks four, models three layers. Unless a line says otherwise, a position predicts the token after it, and the step
is the block's fourth and its sub-block's second.
"""

from dataclasses import replace
from typing import Any

import pytest

from stepsaver.engine import registry
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import describe, position_list
from stepsaver.engine.rules.layer_reuse import layer_group
from stepsaver.engine.rules.rule import base_plan, parse_rule, plan_commit, plan_rest, plan_step
from stepsaver.engine.view import StepView
from tests.engine.rule_cases import ACTING, NEUTRAL, combined_rule_sets, names_in_the_registry, rule_sets
from tests.engine.test_reuse import engine_of
from tests.engine.views import at, seen

FIRST = {"masked": "4-7", "in_sub_block": 0}  # a sub-block's first step: the base plan runs the whole block, reads 3-6
LATER = {"masked": "6-7", "in_sub_block": 2}  # it runs the sub-block, reads 5-6
OWN = {"masked": "4-7", "in_sub_block": 1, "predicts": "self"}  # every step but the first runs the sub-block, reads 4-7
UNMASKED = {0: "0", 1: "1-2", 2: "3"}  # by step; the next one is step 3
DRIFT = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.5, 4: 0.2, 7: 0.3}  # -1 elsewhere: never measured, or its token changed

# the rules, the view, and the kind and positions of the plan; hidden ones behind a stroke
WINDOWS: list[tuple[str, dict[str, Any], str]] = [
    ("window", FIRST, "sub 3-7"),
    ("window", FIRST | {"changed": "0,3"}, "sub 0,3-7"),  # a changed position's keys would be those of a mask
    ("window", FIRST | {"step": 0}, "full 0-7"),
    ("window", LATER, "sub 4-7"),  # the base plan's own
    ("window", LATER | {"block_cache": False}, "sub 3-7"),
    ("window:refresh=sub-block", FIRST, "full 0-7"),
    ("window:refresh=sub-block", FIRST | {"in_sub_block": 1}, "sub 3-7"),
    ("window:refresh=drift", FIRST | {"drift_since_full": 0.49}, "sub 3-7"),
    ("window:refresh=drift", FIRST | {"drift_since_full": 0.5}, "full 0-7"),
    ("window:refresh=drift,limit=2", FIRST | {"drift_since_full": 1.9}, "sub 3-7"),
    ("window:refresh=drift,limit=2", FIRST | {"drift_since_full": 2.0}, "full 0-7"),
    ("window:refresh=block,limit=0", FIRST | {"drift_since_full": 1.0}, "sub 3-7"),
    ("suffix_dropout", {"masked": "2-7", "sub_block": 2}, "full 0-3 | 4-7"),
    ("suffix_dropout", {"masked": "2-7", "sub_block": 2, "step": 0}, "full 0-3 | 4-7"),
    ("suffix_dropout:ahead=1", {"masked": "2-7", "sub_block": 2}, "full 0-4 | 5-7"),
    ("suffix_dropout:ahead=3", {"masked": "3-7", "sub_block": 2}, "sub 2-3 | 7"),
    ("suffix_dropout:ahead=5", {"masked": "2-7", "sub_block": 2}, "full 0-7"),
    ("suffix_dropout", FIRST, "full 0-7"),  # the last sub-block
    # trim: what is read runs, then what changed, then what settles
    ("trim:settle=0", FIRST, "sub 3-6"),
    ("trim:settle=0", FIRST | {"changed": "0"}, "sub 0,3-6"),
    ("trim:settle=0", FIRST | {"unmasked": UNMASKED}, "sub 3-6"),
    ("trim:settle=0", FIRST | {"unmasked": {1: "1", 2: "2"}}, "sub 2-6"),
    ("trim", FIRST | {"unmasked": UNMASKED}, "sub 1-6"),
    ("trim:settle=2", FIRST | {"unmasked": UNMASKED}, "sub 0-6"),
    ("trim:settle=2", FIRST | {"unmasked": UNMASKED, "step": 4}, "sub 1-6"),
    ("trim:settle=0", FIRST | {"step": 0}, "full 0-7"),
    ("trim:settle=0", LATER, "sub 5-6"),
    ("trim:settle=0", OWN | {"masked": "5,7"}, "sub 5,7"),
    ("trim:level=structural,settle=0", FIRST, "sub 3-7"),
    (
        "trim:level=structural,settle=0",
        {"masked": "1,3-7"},
        "sub 0-3",
    ),  # masked positions behind the window stay out of it
    ("trim:level=structural,settle=0", {"masked": "0,5-7", "in_sub_block": 0}, "sub 0,5-7"),
    # of drift: the first masked position, masked ones at most 2 from a change, the overdue, and those that drifted most
    ("trim:level=drift,settle=0,budget=0", FIRST, "sub 3-6"),
    ("trim:level=drift,settle=0,budget=0", OWN | {"masked": "5,7"}, "sub 5,7"),
    ("trim:level=drift,settle=0,budget=0", FIRST | {"masked": "3-7", "changed": "2"}, "sub 2-4"),
    ("trim:level=drift,settle=0,budget=0", FIRST | {"masked": "3,5-7", "changed": "4"}, "sub 2-6"),
    ("trim:level=drift,settle=0,budget=0", FIRST | {"masked": "3,6-7", "changed": "1"}, "sub 1-3"),
    ("trim:level=drift,settle=0,budget=0", FIRST | {"masked": "1,3,7", "changed": "6"}, "sub 0-2,6-7"),
    ("trim:level=drift,settle=0,budget=1", FIRST | {"drift": DRIFT}, "sub 1,3-6"),
    ("trim:level=drift,settle=0,budget=2", FIRST | {"drift": DRIFT}, "sub 1-6"),
    ("trim:level=drift,settle=0,budget=3", FIRST | {"drift": DRIFT}, "sub 1-7"),
    ("trim:level=drift,settle=0", FIRST | {"drift": DRIFT}, "full 0-7"),  # a budget of 4
    ("trim:level=drift,settle=0,budget=1", {"masked": "7", "drift": DRIFT | {5: 0.2}}, "sub 4,6-7"),  # the first equal
    (
        "trim:level=drift,settle=0,budget=1",
        {"masked": "7", "drift": DRIFT | {5: 0.2}, "confidence": {4: 0.9, 5: 0.8}},
        "sub 5-7",
    ),
    (
        "trim:level=drift,settle=0,budget=1",
        {"masked": "7", "drift": DRIFT | {5: 0.2}, "confidence": {4: 0.9}},
        "sub 5-7",
    ),
    ("trim:level=drift,settle=0,budget=0", FIRST | {"step": 6, "last_run": {0: 1, 1: 2, 2: 0}}, "sub 0,2-6"),
    ("trim:level=drift,settle=0,budget=0,age=6", FIRST | {"step": 6, "last_run": {0: -1, 1: 0}}, "sub 0,3-6"),
    ("trim:level=random,settle=0,budget=0", FIRST, "sub 3-6"),
    ("trim:level=random,settle=0,budget=1", FIRST, "sub 1,3-6"),  # by their hash: 1, 0, 2, 7; in the next step 7 first
    ("trim:level=random,settle=0,budget=2", FIRST, "sub 0-1,3-6"),
    ("trim:level=random,settle=0,budget=1", FIRST | {"step": 4}, "sub 3-7"),
    ("trim:level=random,settle=0,budget=9", FIRST, "full 0-7"),
    ("layer_reuse:k=2,mode=output", LATER | {"confidence": {6: 0.1, 7: 0.1}}, "reused none"),
    ("layer_reuse:k=3,mode=output", LATER | {"confidence": {6: 0.1, 7: 0.1}}, "sub 4-7"),  # step 3
    ("layer_reuse:k=3,mode=output", LATER | {"confidence": {6: 0.1, 7: 0.1}, "step": 4}, "reused none"),
    ("layer_reuse:k=2,mode=output", LATER | {"confidence": {6: 0.1}}, "sub 4-7"),  # nothing was proposed for 7
    ("layer_reuse:k=2,mode=output", FIRST | {"confidence": dict.fromkeys(range(8), 0.1)}, "full 0-7"),
    ("layer_reuse:k=1,mode=output", LATER | {"confidence": {6: 0.1, 7: 0.1}}, "sub 4-7"),
    ("partial_commit", FIRST, "full 0-7"),  # steps are whole
    ("window + trim:settle=0", FIRST | {"changed": "0"}, "sub 0,3-6"),
    ("suffix_dropout + window", {"masked": "2-7", "sub_block": 2}, "sub 1-3 | 4-7"),
    (
        "window + trim + layer_reuse:k=2,mode=output",
        FIRST | {"confidence": dict.fromkeys(range(8), 0.1)},
        "reused none",
    ),
]

# the rule, which positions were unmasked at which step, which changed; the commit's positions, after three steps
COMMITS: list[tuple[str, dict[int, str], str, str]] = [
    ("partial_commit:settle=0", UNMASKED, "", "3,7"),  # the last position is read
    ("partial_commit:settle=0", UNMASKED, "0,5", "0,3,5,7"),
    ("partial_commit", UNMASKED, "", "1-3,7"),
    ("partial_commit:settle=2", UNMASKED, "", "0-3,7"),
    ("partial_commit:settle=all", UNMASKED, "", "0-7"),
    ("trim", UNMASKED, "", "0-7"),
    ("suffix_dropout", UNMASKED, "", "0-7"),
    ("window", UNMASKED, "", "0-7"),
    ("layer_reuse:k=2", UNMASKED, "", "0-7"),
    ("adaptive_layers:probe=1", UNMASKED, "", "0-7"),
]

WHOLE = ("0-7", "0-7", "0-7")
LAST = ("3-6", "0-7", "3-6")  # after the last layer's keys and values, only what is read goes on
# the rule, the view, and per layer the positions of attention, of keys and values and of the MLP that run; positions 3
# and 6 changed
LAYERS: list[tuple[str, dict[str, Any], list[tuple[str, str, str]]]] = [
    ("layer_reuse:k=1,layers=all", {}, [WHOLE, WHOLE, LAST]),
    ("layer_reuse:k=2,layers=0", {}, [("3,6", "0-7", "3,6"), WHOLE, LAST]),
    ("layer_reuse:k=2,layers=0-1", {}, [("3,6", "0-7", "3,6"), ("3,6", "0-7", "3,6"), LAST]),
    ("layer_reuse:k=2,layers=last", {}, [WHOLE, WHOLE, ("3,6", "0-7", "3,6")]),
    ("layer_reuse:k=2,layers=all,kv=freeze", {}, [("3,6",) * 3] * 3),
    ("layer_reuse:k=2,layers=0,mode=mlp", {}, [("0-7", "0-7", "3,6"), WHOLE, LAST]),
    ("layer_reuse:k=2,layers=0", {"ages": {0: 1, 1: 1, 2: 2}}, [("0-3,6", "0-7", "0-3,6"), WHOLE, LAST]),
    ("layer_reuse:k=3,layers=0", {"ages": {0: 1, 1: 1, 2: 2}}, [("2-3,6", "0-7", "2-3,6"), WHOLE, LAST]),
    ("layer_reuse:k=3,layers=0,mode=mlp", {"ages": {0: 1, 1: 2}}, [("0-7", "0-7", "1,3,6"), WHOLE, LAST]),
    (
        "layer_reuse:k=2,layers=0-1",
        {"stale": {0: "3,6", 1: "1-3,6"}},
        [("3,6", "0-7", "3,6"), ("1-3,6", "0-7", "1-3,6"), LAST],
    ),
]


def rules_of(texts: str) -> tuple:
    return tuple(parse_rule(text) for text in texts.split(" + "))


def shown(plan: StepPlan) -> str:
    hidden = f" | {describe(plan.hidden)}" if plan.hidden else ""
    return f"{plan.kind} {describe(plan.window)}{hidden}"


@pytest.mark.parametrize(("rules", "view", "expected"), WINDOWS)
def test_the_positions_that_a_rule_leaves_in_a_step(rules: str, view: dict[str, Any], expected: str) -> None:
    given = seen(**view)
    plan = plan_step(given, rules_of(rules))
    assert shown(plan) == expected
    if not plan.is_empty:
        assert plan.reads == base_plan(given).reads
        assert {positions for layer in plan.layers[:-1] for positions in layer} == {plan.window}


@pytest.mark.parametrize(("rule", "unmasked", "changed", "expected"), COMMITS)
def test_the_positions_that_a_rule_leaves_in_a_commit(
    rule: str, unmasked: dict[int, str], changed: str, expected: str
) -> None:
    plan = plan_commit(seen("", unmasked=unmasked, changed=changed), rules_of(rule))
    assert shown(plan) == f"commit {expected}"
    assert position_list(plan.reads) == (7,)


def layers_shown(plan: StepPlan) -> list[tuple[str, ...]]:
    return [tuple(map(describe, layer)) for layer in plan.layers]


@pytest.mark.parametrize(("rule", "view", "expected"), LAYERS)
def test_the_positions_whose_deltas_a_layer_reuses(rule: str, view: dict[str, Any], expected: list) -> None:
    given = FIRST | {"stale": dict.fromkeys(range(3), "3,6")} | view
    assert layers_shown(plan_step(seen(**given), rules_of(rule))) == expected


CALM = dict.fromkeys(range(8), 0.05) | {2: 0.1, 3: -1.0, 5: 0.29, 6: 0.31}


@pytest.mark.parametrize(
    ("rule", "view", "expected"),
    [
        ("probe=1", {}, [WHOLE, ("2-3,5-6", "0-7", "2-3,5-6"), ("3,5-6", "0-7", "3,5-6")]),
        ("probe=2", {}, [WHOLE, WHOLE, ("3,5-6", "0-7", "3,5-6")]),
        ("probe=1,threshold=0.3", {}, [WHOLE, ("3,6", "0-7", "3,6"), ("3,6", "0-7", "3,6")]),
        ("probe=2,threshold=0.3", {"ages": {0: 2, 4: 3}}, [WHOLE, WHOLE, ("3-4,6", "0-7", "3-4,6")]),
        ("probe=2,threshold=0.3,max_age=2", {"ages": {4: 1, 5: 2}}, [WHOLE, WHOLE, ("3,5-6", "0-7", "3,5-6")]),
        ("probe=1,threshold=0.3", {"stale": {1: "0"}}, [WHOLE, ("0,3,6", "0-7", "0,3,6"), ("3,6", "0-7", "3,6")]),
    ],
)
def test_the_positions_that_adaptive_layers_leaves_after_its_probe(rule: str, view: dict, expected: list) -> None:
    rules = rules_of(f"adaptive_layers:{rule}")
    given = seen(**FIRST, drift=CALM, **view)
    asking = plan_step(given, rules)
    assert layers_shown(asking) == [WHOLE, WHOLE, LAST]
    assert asking.ask_after == rules[0].probe - 1
    assert layers_shown(plan_rest(asking, given, rules)) == expected


def test_adaptive_layers_asks_for_nothing_where_it_cannot_act() -> None:
    assert plan_step(seen(**FIRST, drift=CALM, step=0), rules_of("adaptive_layers:probe=1")).ask_after is None
    assert plan_step(seen(**FIRST, drift=CALM), rules_of("adaptive_layers:probe=1,threshold=0")).ask_after is None


NOTHING: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("rule", "deltas", "probed"),
    [
        ("layer_reuse:k=2,layers=0-1", {0, 1}, NOTHING),
        ("layer_reuse:k=2,layers=last", {7, 8, 9, 10, 11}, NOTHING),
        ("layer_reuse:k=1", NOTHING, NOTHING),
        ("layer_reuse:k=2,mode=output", NOTHING, NOTHING),
        ("adaptive_layers:probe=9", {9, 10, 11}, set(range(9))),
        ("adaptive_layers:probe=9,threshold=0", NOTHING, NOTHING),
        ("trim:level=drift", NOTHING, {3}),
        ("trim", NOTHING, NOTHING),
        ("window:refresh=drift", NOTHING, {3}),
        ("window", NOTHING, NOTHING),
        ("suffix_dropout", NOTHING, NOTHING),
        ("partial_commit", NOTHING, NOTHING),
    ],
)
def test_the_layers_whose_deltas_are_kept_or_watched(rule: str, deltas: set[int], probed: set[int]) -> None:
    (made,) = rules_of(rule)
    assert (made.delta_layers(12), made.probe_layers(12)) == (deltas, probed)


class AddsWork:
    """A fault: a rule that gives positions back."""

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return replace(base_plan(view), window=at("0-7"))

    narrow_commit = narrow

    def narrow_after_probe(self, plan: StepPlan, view: StepView, layer: int) -> StepPlan:
        first, *rest = plan.layers
        return replace(plan, layers=(first._replace(mlp=0), *rest))


def test_a_rule_that_adds_work_or_changes_what_has_run_is_a_fault() -> None:
    faulty: Any = (AddsWork(),)
    with pytest.raises(UsageError, match=r"rule AddsWork of tests\.engine.* fails: AssertionError: added work"):
        plan_step(seen(**LATER), faulty)
    with pytest.raises(UsageError, match="changed layers that have run"):
        plan_rest(replace(base_plan(seen(**FIRST)), ask_after=0), seen(**FIRST), faulty)


def test_every_rule_of_the_registry_is_here() -> None:
    shown = " ".join([text for text, *_ in WINDOWS + COMMITS + LAYERS])
    assert names_in_the_registry() == set(NEUTRAL) == set(ACTING)
    assert all(name in shown for name in names_in_the_registry())


def test_what_is_left_open() -> None:
    texts = [registry.describe(parse_rule(name)) for name in ("window", "trim", "suffix_dropout", "partial_commit")]
    assert texts == [
        "window:refresh=block,limit=0.5",
        "trim:level=changed,budget=4,settle=1,age=4",
        "suffix_dropout:ahead=0",
        "partial_commit:settle=1",
    ]
    assert registry.describe(parse_rule("layer_reuse:k=2")) == "layer_reuse:k=2,layers=last,mode=delta,kv=refresh"
    assert registry.describe(parse_rule("adaptive_layers")) == "adaptive_layers:probe=4,threshold=0.1,max_age=3"


@pytest.mark.parametrize("rules", rule_sets(NEUTRAL) + rule_sets(ACTING) + combined_rule_sets())
def test_rules_survive_their_own_description(rules: tuple) -> None:
    assert tuple(parse_rule(registry.describe(rule)) for rule in rules) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer_reus:k=2", "nearest: layer_reuse"),
        ("layer_reuse:kk=2", "nearest: k"),
        ("layer_reuse:k=two", "whole number"),
        ("layer_reuse:k=0", "k 0 is not positive"),
        ("layer_reuse:k=2,k=3", "twice"),
        ("layer_reuse:k=2,mode=delt", "nearest: delta"),
        ("layer_reuse:k=2,mode=mlp,kv=freeze", "belongs to mode=delta"),
        ("layer_reuse:k=2,layers=3-1", "'3-1' is no range"),
        ("layer_reuse", "needs k"),
        ("trim:budget=-1", "budget -1 is below 0"),
        ("trim:settle=-1", "settle -1 is below 0"),
        ("trim:age=0", "age 0 is below 1"),
        ("trim:level", "not field=value"),
        ("window:refresh=never", "nearest"),
        ("window:limit=-1", "limit -1.0 is negative"),
        ("window:limit=nan", "limit nan is negative"),
        ("adaptive_layers:probe=0", "probe 0 is not positive"),
        ("adaptive_layers:threshold=nan", "threshold nan is negative"),
        ("adaptive_layers:max_age=0", "max_age 0 is not positive"),
        ("suffix_dropout:ahead=-1", "ahead -1 is negative"),
        ("partial_commit:settle=-1", "settle -1 is negative"),
        ("partial_commit:settle=some", "whole number"),
    ],
)
def test_wrong_rules_get_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_rule(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ("layer_reuse:k=2,layers=2-3", {}, "not within 0-2"),
        ("layer_reuse:k=2,layers=lst", {}, "allowed: first"),
        ("adaptive_layers:probe=3", {}, "probe 3 leaves no layer of 3 to skip"),
        ("trim", {"block_cache": False}, "rule trim needs the block cache"),
        ("trim + trim:level=drift", {}, "rule trim is given twice"),
        ("suffix_dropout:ahead=4", {}, "leave none of the block's 8 out"),
        ("suffix_dropout", {"sub_block_size": 8}, "leave none"),
    ],
)
def test_impossible_combinations_get_one_line(tiny_model: Transformer, rules: str, options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(tiny_model, rules_of(rules), **options)


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ("suffix_dropout:ahead=3", {}),
        ("adaptive_layers:probe=2", {}),
        ("layer_reuse:k=2,layers=0-2", {}),
        ("suffix_dropout", {"block_cache": False}),
        ("partial_commit", {"block_cache": False}),
    ],
)
def test_what_just_fits_is_taken(tiny_model: Transformer, rules: str, options: dict) -> None:
    engine_of(tiny_model, rules_of(rules), **options)


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("first", 28, range(1, 13)),  # the source's groups
        ("middle", 28, range(8, 20)),
        ("last", 28, range(16, 28)),
        ("first", 3, range(1, 2)),
        ("middle", 3, range(1, 2)),
        ("last", 3, range(2, 3)),
        ("first", 1, range(1)),
        ("thirds:1", 28, range(9)),
        ("thirds:2", 28, range(9, 18)),
        ("thirds:3", 28, range(18, 27)),
        ("all", 5, range(5)),
        ("4-6,2", 28, (2, 4, 5, 6)),
        ("27", 28, (27,)),
    ],
)
def test_groups_of_layers(name: str, layers: int, expected: range) -> None:
    assert layer_group(name, layers) == frozenset(expected)


def test_a_model_too_small_for_thirds_is_one_line() -> None:
    for layers, named in ((1, "1 layer has"), (2, "2 layers has")):
        with pytest.raises(UsageError, match=f"a model of {named} no thirds"):
            layer_group("thirds:1", layers)
