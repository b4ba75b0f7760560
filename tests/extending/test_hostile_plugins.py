"""Rules and policies of others may do anything: what is wrong is one line with their name, and harms nobody else."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import stepsaver
from stepsaver.engine.plan import commit_plan
from stepsaver.extending import Rule, position_list

QUESTION = "Tom has 12 pens and buys 5 more pens. How many pens does Tom have?"
Hook = Callable[..., Any]


def _raises(error: BaseException) -> Hook:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


def _more(self: Any, plan: Any, view: Any, *_: Any) -> Any:
    """Every row of every layer, whatever was left out before."""
    return commit_plan(view.block_size, layers=view.layers, prediction=view.prediction)


def _hidden_and_shown(self: Any, plan: Any, view: Any, *_: Any) -> Any:
    first, *rest = plan.layers
    return replace(plan, layers=(first._replace(mlp=first.mlp | 1 << 40), *rest))


GARBAGE: list[Any] = [
    None,
    3,
    -1,
    1.5,
    "x",
    "two\nlines",
    b"x",
    [],
    {},
    float("nan"),
    10**30,
    object(),
    np.int64(1),
    print,
]
ERRORS = [ValueError("bad"), RuntimeError("two\nlines"), KeyError(1), MemoryError(), RecursionError(), StopIteration()]
DEEDS: list[Hook] = [
    *(_raises(error) for error in ERRORS),
    *((lambda *_, value=value: value) for value in GARBAGE),
]
RULE_HOOKS = ("narrow", "narrow_commit", "check", "delta_layers", "probe_layers")
CHOICES: list[Hook] = [
    lambda self, candidates, view: 0,
    lambda self, candidates, view: -1,
    lambda self, candidates, view: 1 << 40,
    lambda self, candidates, view: (1 << view.block_size) - 1 | 1 << 60,
    lambda self, candidates, view: np.int64(1 << candidates.positions[0]),
    lambda self, candidates, view: list(candidates.positions),
    lambda self, candidates, view: self.choose(candidates, view),
]


def _rule(**hooks: Hook) -> Rule:
    body = {"name": "hostile", "__annotations__": {"name": ClassVar[str]}}
    usual = {"narrow": lambda self, plan, view: plan}
    made: type = dataclass(frozen=True)(type("Hostile", (Rule,), body | usual | hooks))
    return made()  # type: ignore[no-any-return]


def _policy(choose: Hook) -> Any:
    body = {"name": "hostile", "choose": choose, "__annotations__": {"name": ClassVar[str]}}
    return dataclass(frozen=True)(type("Hostile", (), body))()


@pytest.fixture(scope="module")
def model() -> stepsaver.Model:
    return stepsaver.load("embedded")


def _outcome(model: stepsaver.Model, **chosen: Any) -> str | list[str]:
    """The texts, or the one line."""
    try:
        return model.generate([QUESTION, "What is 3 + 4?"], max_new_tokens=40, **chosen)
    except stepsaver.UsageError as error:
        said = str(error)
    assert "hostile of" in said
    assert "\n" not in said
    assert len(said) < 400
    return said


@pytest.mark.parametrize("tries", [30, pytest.param(600, marks=pytest.mark.long)])
def test_what_a_rule_does_wrong_is_one_line_or_changes_nothing(model: stepsaver.Model, tries: int) -> None:
    """Whatever a hook returns or raises, also from its third call on: never another error, never another text."""
    plain = _outcome(model)
    draw = random.Random(tries)
    for number in range(tries):
        hook = draw.choice(RULE_HOOKS)
        deed = draw.choice([*DEEDS, _more, _hidden_and_shown]) if hook.startswith("narrow") else draw.choice(DEEDS)
        calls, late = [0], draw.choice([0, 0, 2]) if hook.startswith("narrow") else 0
        usual = getattr(Rule, hook) if hook != "narrow" else lambda self, plan, view: plan

        def acting(self: Any, *given: Any, deed: Hook = deed, usual: Hook = usual, calls: list[int] = calls,
                   late: int = late) -> Any:  # fmt: skip
            calls[0] += 1
            return deed(self, *given) if calls[0] > late else usual(self, *given)

        found = _outcome(model, rules=[_rule(**{hook: acting}), "trim"])
        if not isinstance(found, str):
            assert found == _outcome(model, rules="trim"), (number, hook)
    assert _outcome(model) == plain


@pytest.mark.parametrize("tries", [20, pytest.param(400, marks=pytest.mark.long)])
def test_what_a_policy_does_wrong_is_one_line(model: stepsaver.Model, tries: int) -> None:
    plain = _outcome(model)
    draw = random.Random(tries)
    for _ in range(tries):
        deed, late = draw.choice([*DEEDS, *CHOICES]), draw.choice([0, 0, 3])
        calls = [0]

        def choose(self: Any, candidates: Any, view: Any, deed: Hook = deed, calls: list[int] = calls,
                   late: int = late) -> Any:  # fmt: skip
            calls[0] += 1
            return deed(self, candidates, view) if calls[0] > late else 1 << position_list(view.candidates)[0]

        assert "policy hostile of" in _outcome(model, policy=_policy(choose))
    assert _outcome(model) == plain


def test_an_exit_is_no_error(model: stepsaver.Model) -> None:
    """`sys.exit` and Ctrl-C in a plug-in end the call as they do anywhere else."""
    with pytest.raises(SystemExit):
        _outcome(model, rules=[_rule(narrow=lambda *_: sys.exit(3))])
