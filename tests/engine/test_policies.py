"""The exact positions that each policy unmasks, and what every policy of the registry promises.

A new policy adds its lines to `CHOICES` and `WRONG`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from stepsaver.engine import registry
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import Candidates, Policy, chosen_policy, parse_policy
from stepsaver.engine.policies.policy import policy_text as text_of
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import Positions, describe, is_subset, position_list
from stepsaver.engine.trace import DENOISING
from stepsaver.engine.view import StepView
from tests.engine.views import at, seen

SURE = {4: 0.95, 5: 0.90, 6: 0.60, 7: 0.97}  # 7, 4, 5, 6
EQUAL = {3: 0.5, 4: 0.75, 5: 0.75, 6: 0.75}
ONE = {6: 0.2}

# the policy, how sure the model is of each masked position, and which of them are unmasked
CHOICES: list[tuple[str, dict[int, float], str]] = [
    ("threshold", SURE, "4,7"),  # 0.9 is not above 0.9
    ("threshold:threshold=0.89", SURE, "4-5,7"),
    ("threshold:threshold=0.99", SURE, "7"),
    ("threshold:strict=false", SURE, "4-5,7"),
    ("threshold:threshold=0.1,at_most=1", SURE, "7"),
    ("threshold:threshold=0.1,at_most=3", SURE, "4-5,7"),
    ("threshold:threshold=0.1,at_most=2", EQUAL, "4-5"),  # of equals the first
    ("threshold:threshold=0.75", EQUAL, "4"),
    ("threshold", ONE, "6"),
    ("fixed", SURE, "7"),
    ("fixed:rows=3", SURE, "4-5,7"),
    ("fixed:rows=100", SURE, "4-7"),
    ("fixed:rows=2", EQUAL, "4-5"),
    # (n + 1)(1 - c_n): 0.06, 0.15, 0.4, 2.0
    ("factor", SURE, "4-5,7"),
    ("factor:factor=0", SURE, "7"),
    ("factor:factor=0.2", SURE, "4,7"),
    ("factor:factor=1.9", SURE, "4-5,7"),
    ("factor:factor=2.1", SURE, "4-7"),
    ("factor:factor=0.75", EQUAL, "4"),  # 0.5, 0.75, 1.0, 2.5: not below 0.75
    ("factor", EQUAL, "4-5"),
    ("factor:factor=1.1", EQUAL, "4-6"),
    # doubts: 0.03, 0.05, 0.1, 0.4
    ("adaptive_steps", SURE, "4-5,7"),
    ("adaptive_steps:margin=0.15", SURE, "4,7"),  # 0.03 + 0.05 + 0.1 is not below
    ("adaptive_steps:margin=0.2", SURE, "4-5,7"),
    ("adaptive_steps:margin=1,max_rows=1", SURE, "4-5,7"),
    ("adaptive_steps:margin=1,max_rows=2", SURE, "4-7"),
    ("adaptive_steps:margin=1,max_rows=0", SURE, "4,7"),
    ("adaptive_steps:threshold=0.96", SURE, "4-5,7"),
    ("adaptive_steps:margin=1,max_rows=1,threshold=0.5", SURE, "4-7"),
    ("adaptive_steps:margin=0", SURE, "4,7"),
    ("adaptive_steps:margin=0.5", EQUAL, "4"),  # 0.25 + 0.25 is not below
    ("adaptive_steps:margin=1,max_rows=1", EQUAL, "4-5"),
    ("quota", SURE, "7"),
    ("quota:threshold=0.89", SURE, "4-5,7"),
    ("quota:steps=1", SURE, "4-7"),
    ("quota:steps=2", SURE, "4,7"),
    ("quota:steps=3", SURE, "4,7"),
    ("quota:steps=9", SURE, "7"),
    ("quota:steps=4,threshold=0.89", SURE, "4-5,7"),
    ("quota:steps=4,threshold=0.9", SURE, "4,7"),
    ("quota:steps=1,threshold=0.9", SURE, "4-7"),  # the share, though fewer are sure
    ("quota:steps=2", EQUAL, "4-5"),
]
WRONG = {
    "adaptive_steps": ["margin=-1", "margin=nan", "max_rows=-1", "threshold=2"],
    "factor": ["factor=-1", "factor=nan"],
    "fixed": ["rows=0"],
    "quota": ["steps=0", "steps=2,threshold=1.5", "steps=2,threshold=-0.5", "steps=2,threshold=x"],
    "threshold": ["threshold=1.5", "threshold=-0.1", "threshold=nan", "at_most=0"],
}
LIMITS = ["adaptive_steps:margin=0,max_rows=0,threshold=0", "factor:factor=0", "fixed:rows=1", "quota:steps=1"]
LIMITS += ["quota:steps=1,threshold=0", "quota:steps=1,threshold=1", "threshold:threshold=0,at_most=1"]
LIMITS += ["threshold:threshold=1"]
TEXTS = sorted({text for text, _, _ in CHOICES})
PROMPTS = [tuple(range(5, 8)), tuple(range(5, 28)), (9,)]


def chosen(text: str, sure: dict[int, float], **view: Any) -> str:
    policy = parse_policy(text)
    masked = ",".join(map(str, sure))
    return describe(
        policy.choose(Candidates(tuple(sure), tuple(sure.values())), seen(masked, **({"in_sub_block": 0} | view)))
    )


@pytest.mark.parametrize(("text", "sure", "expected"), CHOICES)
def test_the_positions_that_a_policy_unmasks(text: str, sure: dict[int, float], expected: str) -> None:
    assert chosen(text, sure) == expected


@pytest.mark.parametrize(
    ("steps", "sub_block", "counts"),
    [(3, 8, [3, 3, 2]), (3, 4, [2, 1, 1]), (2, 4, [2, 2]), (5, 8, [2, 2, 2, 1, 1]), (6, 4, [1, 1, 1, 1])],
)
def test_the_remainder_of_a_quota_goes_to_the_first_steps(steps: int, sub_block: int, counts: list[int]) -> None:
    sure = dict.fromkeys(range(8), 0.5)
    found = [
        at(chosen(f"quota:steps={steps}", sure, sub_block=sub_block, in_sub_block=step)).bit_count()
        for step in range(len(counts))
    ]
    assert found == counts


def test_after_a_causal_context_a_quota_divides_what_follows_the_first_token() -> None:
    sure = dict.fromkeys(range(1, 8), 0.5)
    view: dict[str, Any] = {"sub_block": 8, "predicts": "both"}
    assert [at(chosen("quota:steps=3", sure, in_sub_block=step, **view)).bit_count() for step in range(3)] == [3, 2, 2]
    assert at(chosen("quota", sure, **view)).bit_count() == 1


def test_every_policy_is_tested() -> None:
    names = registry.found_in("stepsaver.engine.policies").keys()
    assert {text.partition(":")[0] for text in TEXTS} == WRONG.keys() == names


@pytest.mark.parametrize("text", [*TEXTS, *LIMITS])
def test_a_policy_is_its_text(text: str) -> None:
    policy: Any = parse_policy(text)
    assert parse_policy(registry.describe(policy)) == policy
    assert hash(parse_policy(text)) == hash(policy)
    with pytest.raises(AttributeError):
        setattr(policy, fields(policy)[0].name, 1)


def test_what_is_left_open() -> None:
    assert [registry.describe(parse_policy(name)) for name in ("threshold", "factor", "fixed", "adaptive_steps")] == [
        "threshold:threshold=0.9,at_most=none,strict=true",
        "factor:factor=1.0",
        "fixed:rows=1",
        "adaptive_steps:margin=0.3,max_rows=2,threshold=0.9",
    ]
    assert registry.describe(parse_policy("quota:steps=2")) == "quota:steps=2,threshold=none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verified:span=4,ahead=verified", "policy 'verified:span=4,ahead=verified' is a decoder now: --decode "),
        ("treshold", "unknown policy 'treshold'; nearest: threshold"),
    ],
)
def test_what_is_no_policy_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_policy(text)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("text", [f"{name}:{wrong}" for name, texts in WRONG.items() for wrong in texts])
def test_impossible_values_are_one_line(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_policy(text)
    assert "\n" not in str(raised.value)
    field = text.rpartition(",")[2].rpartition(":")[2].partition("=")[0]
    assert field in str(raised.value)


def test_a_threshold_is_a_policy() -> None:
    assert parse_policy("threshold:at_most=none") == parse_policy("threshold") == Threshold()
    assert registry.describe(Threshold(0.5, 2)) == "threshold:threshold=0.5,at_most=2,strict=true"
    assert text_of(None, None) == text_of("threshold", None) == "threshold"
    assert text_of(None, 0.0) == text_of("threshold", 0.0) == "threshold:threshold=0.0"
    assert text_of("factor", None) == "factor"
    assert text_of(None, 0.5, "threshold:strict=false") == "threshold:strict=false,threshold=0.5"
    assert text_of(None, 0.5, "quota") == "threshold:threshold=0.5"
    assert chosen_policy(None, 0.7) == chosen_policy("threshold", 0.7) == chosen_policy(Threshold(0.7), None)
    for wrong, message in (
        (("factor", 0.5), "policy 'factor' and threshold 0.5 exclude each other"),
        ((Threshold(), 0.5), "policy threshold and threshold 0.5 exclude each other"),
        ((Threshold, None), "is no policy: expected text such as 'threshold'"),
        ((3, None), "is no policy"),
    ):
        with pytest.raises(UsageError, match=message):
            chosen_policy(*wrong)  # type: ignore[arg-type]


@dataclass
class Watched:
    """A policy whose every choice is held against the contract."""

    name: ClassVar[str] = "watched"

    policy: Policy
    choices: int = 0

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        choice = self.policy.choose(candidates, view)
        assert choice, "a step makes progress"
        assert is_subset(choice, view.candidates), "only masked positions of the sub-block are unmasked"
        assert candidates.positions == position_list(view.candidates)
        self.choices += 1
        return choice


@pytest.mark.parametrize("text", LIMITS)
def test_every_choice_keeps_the_contract_in_any_batch(tiny_model: Transformer, text: str) -> None:
    decoding = resolve_decoding(tiny_model.config, sub_block_size=4, stop_ids=())

    def decode(prompts: list[tuple[int, ...]], batch_size: int) -> list[list[int]]:
        policy = Watched(parse_policy(text))
        engine = Engine(tiny_model, decoder=Denoise(policy), decoding=decoding, batch_size=batch_size, checked=True)
        found = sorted(engine.generate(prompts, max_new_tokens=21), key=lambda each: each.index)
        assert policy.choices > len(prompts)
        return [each.ids for each in found]

    together = decode(PROMPTS, 3)
    assert [len(ids) for ids in together] == [21] * 3
    assert together == [decode([prompt], 1)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(("at_most", "expected"), [(1, [1] * 4), (3, [3, 1]), (4, [4])])
def test_a_paced_block_takes_so_many_steps(tiny_model: Transformer, at_most: int, expected: list[int]) -> None:
    decoding = resolve_decoding(tiny_model.config, sub_block_size=4, stop_ids=())
    engine = Engine(tiny_model, decoder=Denoise(Threshold(0.0, at_most)), decoding=decoding)
    (completion,) = engine.generate([tuple(range(5, 9))], max_new_tokens=4)
    assert [step.unmasked for step in completion.steps if step.kind in DENOISING] == expected
