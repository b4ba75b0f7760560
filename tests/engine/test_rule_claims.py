"""What rules say about themselves, held against what they do, for every rule of the registry."""

import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from stepsaver.engine import registry
from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import Rule, Shares, parse_rule
from stepsaver.engine.trace import Trace
from tests.engine.rule_cases import ACTING, rule_sets

PROMPTS = [(5, 6, 7), tuple(range(10, 26)), (9,)]
VALUES: dict[Any, tuple] = {int: (0, 1, 2), float: (0.0, 0.5), str: ("first", "last"), bool: (False, True)}


def settings() -> Iterator[Rule]:
    """Every rule in every combination of a few values of its fields, as far as it takes them."""
    for rule in registry.found_in("stepsaver.engine.rules").values():
        hints = typing.get_type_hints(rule)
        values = [tuple(_values(hints[field.name])) for field in fields(rule)]
        for combination in itertools.product(*values):
            try:
                made = rule(*combination)
                made.check(3)
            except UsageError:
                continue
            yield made


def _values(hint: Any) -> Iterator[Any]:
    """A few values of a field's type: of each member of a union, such as a number or a word."""
    if hint in VALUES:
        yield from VALUES[hint]
    elif typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    else:
        for member in typing.get_args(hint):
            yield from _values(member)


SETTINGS = list(settings())
INERT = [rule for rule in SETTINGS if rule.inert_reason()]


def engine_of(model: Transformer, *rules: Rule, policy: Any = None, batch_size: int = 1) -> Engine:
    decoding = resolve_decoding(model.config, sub_block_size=4, stop_ids=())
    return Engine(model, decoder=Denoise(policy or Threshold(0.5), rules), batch_size=batch_size, decoding=decoding)


def decoded(engine: Engine) -> tuple[list, list]:
    """The texts, and what each step ran, revealed and was how sure of."""
    steps: list = []

    def keep(event: StepEvent) -> None:
        steps.append((event.plan.window, event.plan.layers, event.revealed, event.confidence.copy()))

    found = sorted(engine.generate(PROMPTS, max_new_tokens=20, on_step=keep), key=lambda each: each.index)
    return [each.ids for each in found], steps


def test_the_settings_cover_every_rule() -> None:
    assert {rule.name for rule in SETTINGS} == set(registry.found_in("stepsaver.engine.rules"))
    assert {rule.name for rule in INERT} >= {"layer_reuse", "adaptive_layers", "previous_row"}


@pytest.mark.parametrize("rule", INERT, ids=registry.describe)
def test_settings_that_say_they_are_inert_change_nothing(tiny_model: Transformer, rule: Rule) -> None:
    (plain, plain_steps), (texts, steps) = decoded(engine_of(tiny_model)), decoded(engine_of(tiny_model, rule))
    assert texts == plain
    assert len(steps) == len(plain_steps)
    for ours, theirs in zip(steps, plain_steps, strict=True):
        assert ours[:3] == theirs[:3]
        assert np.array_equal(ours[3], theirs[3], equal_nan=True)


@pytest.mark.parametrize("rule", INERT, ids=registry.describe)
def test_the_ceiling_of_inert_settings_is_nothing(tiny_model: Transformer, rule: Rule) -> None:
    trace, engine = Trace(), engine_of(tiny_model)
    list(engine.generate(PROMPTS, max_new_tokens=20, trace=trace))
    steps = [entry for entry in trace.entries if entry.kind in ("full", "sub")]
    assert {step.kind for step in steps} == {"full", "sub"}
    assert {rule.reusable(step, engine.decoding, 3) for step in steps} == {Shares()}


@pytest.mark.parametrize("rules", rule_sets(ACTING), ids=lambda rules: registry.describe(rules[0]))
def test_settings_that_act_do_not_say_they_are_inert(rules: tuple[Rule, ...]) -> None:
    """That they act is proved beside this, by the rows they leave out."""
    assert [rule.inert_reason() for rule in rules] == [None]


REPLACED = [rule for rule in SETTINGS if rule.same_answers_as() != rule]


@pytest.mark.parametrize("rule", REPLACED, ids=registry.describe)
def test_settings_that_claim_the_same_answers_give_them(tiny_model: Transformer, rule: Rule) -> None:
    stands_for_it = rule.same_answers_as()
    assert stands_for_it.same_answers_as() == stands_for_it
    ours, theirs = decoded(engine_of(tiny_model, rule)), decoded(engine_of(tiny_model, stands_for_it))
    assert ours[0] == theirs[0]


def test_output_reuse_is_told_by_k_and_not_by_its_layers() -> None:
    one, other, thrice = (
        parse_rule(f"layer_reuse:k={k},layers={layers},mode=output").same_answers_as()
        for k, layers in ((2, "first"), (2, "0"), (3, "first"))
    )
    assert one == other != thrice
    deltas = [parse_rule(f"layer_reuse:k=2,layers={layers}").same_answers_as() for layers in ("first", "0")]
    assert deltas[0] != deltas[1]


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 28, 36])
def test_groups_of_layers_are_within_the_model_and_hold_what_is_kept(layers: int) -> None:
    for rule in SETTINGS:
        try:
            rule.check(layers)
        except UsageError:
            continue
        for group in rule.layer_groups(layers).values():
            assert frozenset() < group <= frozenset(range(layers))
            assert rule.delta_layers(layers) <= group


@pytest.mark.parametrize("name", sorted(registry.found_in("stepsaver.engine.rules")))
def test_every_rule_says_what_it_is_for_and_in_which_batches_it_pays(name: str) -> None:
    rule = typing.cast(type[Rule], registry.found_in("stepsaver.engine.rules")[name])
    for text in (rule.purpose, rule.pays):
        assert 20 < len(text) <= 120, text
        assert "\n" not in text
        assert not text.endswith(".")
        assert not re.search(r"\d\.\d", text), "figures are read from experiments, never written down"
    assert re.search(r"\b(small|large|any) (\w+ )?batch|batches", rule.pays), rule.pays
