"""What rules say about themselves, held against what they do, for every rule of the registry."""

import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from stepsaver.bench.audit import with_the_same_answers
from stepsaver.engine import registry
from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.evaluation.inert import inert_setting
from tests.conftest import tiny_config
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
                made.check(resolve_decoding(tiny_config(), sub_block_size=4), 3)
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
INERT = [rule for rule in SETTINGS if inert_setting(rule)]


def engine_of(model: Transformer, *rules: Rule, policy: Any = None, batch_size: int = 1) -> Engine:
    decoding = resolve_decoding(model.config, sub_block_size=4, stop_ids=())
    return Engine(model, decoder=Denoise(policy or Threshold(0.5), rules), batch_size=batch_size, decoding=decoding)


def decoded(engine: Engine) -> tuple[list, list]:
    """The texts, and what each step ran, unmasked and was how sure of."""
    steps: list = []

    def keep(event: StepEvent) -> None:
        steps.append((event.plan.window, event.plan.layers, event.unmasked, event.confidence.copy()))

    found = sorted(engine.generate(PROMPTS, max_new_tokens=20, on_step=keep), key=lambda each: each.index)
    return [each.ids for each in found], steps


def test_the_settings_cover_every_rule() -> None:
    assert {rule.name for rule in SETTINGS} == set(registry.found_in("stepsaver.engine.rules"))
    assert {rule.name for rule in INERT} >= {"layer_reuse", "adaptive_layers", "window"}


@pytest.mark.parametrize("rule", INERT, ids=registry.describe)
def test_settings_that_say_they_are_inert_change_nothing(tiny_model: Transformer, rule: Rule) -> None:
    (plain, plain_steps), (texts, steps) = decoded(engine_of(tiny_model)), decoded(engine_of(tiny_model, rule))
    assert texts == plain
    assert len(steps) == len(plain_steps)
    for ours, theirs in zip(steps, plain_steps, strict=True):
        assert ours[:3] == theirs[:3]
        assert np.array_equal(ours[3], theirs[3], equal_nan=True)


@pytest.mark.parametrize("rules", rule_sets(ACTING), ids=lambda rules: registry.describe(rules[0]))
def test_settings_that_act_do_not_say_they_are_inert(rules: tuple[Rule, ...]) -> None:
    """That they act is proved beside this, by the rows they leave out."""
    assert [inert_setting(rule) for rule in rules] == [None]


REPLACED = [rule for rule in SETTINGS if with_the_same_answers(rule) != rule]


@pytest.mark.parametrize("rule", REPLACED, ids=registry.describe)
def test_settings_that_are_taken_for_the_same_give_the_same_answers(tiny_model: Transformer, rule: Rule) -> None:
    stands_for_it = with_the_same_answers(rule)
    assert with_the_same_answers(stands_for_it) == stands_for_it
    ours, theirs = decoded(engine_of(tiny_model, rule)), decoded(engine_of(tiny_model, stands_for_it))
    assert ours[0] == theirs[0]


def test_output_reuse_is_told_by_k_and_not_by_its_layers() -> None:
    one, other, thrice = (
        with_the_same_answers(parse_rule(f"layer_reuse:k={k},layers={layers},mode=output"))
        for k, layers in ((2, "first"), (2, "0"), (3, "first"))
    )
    assert one == other != thrice
    deltas = [with_the_same_answers(parse_rule(f"layer_reuse:k=2,layers={layers}")) for layers in ("first", "0")]
    assert deltas[0] != deltas[1]


@pytest.mark.parametrize("name", sorted(registry.found_in("stepsaver.engine.rules")))
def test_every_rule_says_what_it_is_for(name: str) -> None:
    purpose = typing.cast(type[Rule], registry.found_in("stepsaver.engine.rules")[name]).purpose
    assert 20 < len(purpose) <= 120, purpose
    assert not purpose.endswith(".")
    assert not re.search(r"\d\.\d|\n", purpose), "figures are read from experiments, never written down"
