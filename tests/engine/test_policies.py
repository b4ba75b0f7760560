"""What every policy of the registry promises. A new policy adds its line to `SETTINGS` and `WRONG`."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import pytest

from stepsaver.engine import registry
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import Candidates, Choice, Policy, parse_policy
from stepsaver.engine.rows import is_subset, row_list
from stepsaver.engine.view import StepView

SETTINGS = {
    "adaptive_steps": ["adaptive_steps", "adaptive_steps:margin=1,max_rows=3,threshold=0.5"],
    "factor": ["factor", "factor:factor=0", "factor:factor=3"],
    "fixed": ["fixed", "fixed:rows=3", "fixed:rows=100"],
    "forced": ["forced:k=1", "forced:k=3,threshold=0.5"],
    "quota": ["quota:steps=1", "quota:steps=3", "quota:steps=100,threshold=0.2"],
    "threshold": ["threshold", "threshold:threshold=0", "threshold:threshold=1,at_most=1"],
}
WRONG = {
    "adaptive_steps": ["margin=-1", "margin=nan", "max_rows=-1", "threshold=2"],
    "factor": ["factor=-1", "factor=nan"],
    "fixed": ["rows=0"],
    "forced": ["k=0", "k=2,threshold=-0.1"],
    "quota": ["steps=0", "steps=2,threshold=1.5"],
    "threshold": ["threshold=1.5", "threshold=nan", "at_most=0"],
}
EVERY_SETTING = [text for texts in SETTINGS.values() for text in texts]
PROMPTS = [tuple(range(5, 8)), tuple(range(5, 28)), (9,)]


@dataclass
class Watched:
    """A policy whose every choice is held against the contract."""

    name: ClassVar[str] = "watched"

    policy: Policy
    choices: int = 0

    def choose(self, candidates: Candidates, view: StepView) -> Choice:
        choice = self.policy.choose(candidates, view)
        assert choice.rows, "a step makes progress"
        assert is_subset(choice.rows, view.candidates), "only masked rows of the sub-block are revealed"
        assert candidates.rows == row_list(view.candidates)
        assert choice.steps >= 1
        assert self.policy.choose(candidates, view) == choice, "the choice follows from what is seen"
        self.choices += 1
        return choice


def decode(model: Transformer, policy: Policy, prompts: list[tuple[int, ...]], batch_size: int) -> list[list[int]]:
    decoding = resolve_decoding(model.config, sub_block_size=4)
    engine = Engine(model, decoder=Denoise(policy), decoding=decoding, batch_size=batch_size, checked=True)
    return [each.ids for each in sorted(engine.generate(prompts, max_new_tokens=21), key=lambda each: each.index)]


def test_every_policy_is_tested() -> None:
    assert SETTINGS.keys() == WRONG.keys() == registry.found_in("stepsaver.engine.policies").keys()


@pytest.mark.parametrize("text", EVERY_SETTING)
def test_a_policy_is_its_text(text: str) -> None:
    policy: Any = parse_policy(text)
    assert parse_policy(registry.describe(policy)) == policy
    assert hash(parse_policy(text)) == hash(policy)
    with pytest.raises(AttributeError):
        setattr(policy, fields(policy)[0].name, 1)


@pytest.mark.parametrize("text", [f"{name}:{wrong}" for name, texts in WRONG.items() for wrong in texts])
def test_impossible_values_are_one_line(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_policy(text)
    assert "\n" not in str(raised.value)
    field = text.rpartition(",")[2].rpartition(":")[2].partition("=")[0]
    assert field in str(raised.value)


@pytest.mark.parametrize("text", EVERY_SETTING)
def test_every_choice_keeps_the_contract(tiny_model: Transformer, text: str) -> None:
    policy = Watched(cast(Policy, parse_policy(text)))
    assert decode(tiny_model, policy, PROMPTS, 2) == decode(tiny_model, parse_policy(text), PROMPTS, 2)
    assert policy.choices > len(PROMPTS)


@pytest.mark.parametrize("text", EVERY_SETTING)
def test_a_text_does_not_depend_on_its_batch(tiny_model: Transformer, text: str) -> None:
    policy = parse_policy(text)
    together = decode(tiny_model, policy, PROMPTS, 3)
    assert together == [decode(tiny_model, policy, [prompt], 1)[0] for prompt in PROMPTS]
    stops = tiny_model.config.stop_ids
    assert all(len(ids) == 21 or ids[-1] in stops for ids in together)
