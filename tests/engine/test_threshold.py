"""The threshold policy and its pace, held against their definition in words."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsaver.engine import registry
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import Candidates, parse_policy
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rows import row_list
from stepsaver.engine.trace import DENOISING
from stepsaver.engine.view import StepView

NO_VIEW = cast(StepView, None)  # the policy looks at confidences alone
confidences = st.lists(st.sampled_from([0.1, 0.5, 0.9, 0.91, 1.0]), min_size=1, max_size=8)


def chosen(policy: Threshold, sure: list[float]) -> set[int]:
    candidates = Candidates(tuple(range(3, 3 + 2 * len(sure), 2)), tuple(sure))
    return {row // 2 - 1 for row in row_list(policy.choose(candidates, NO_VIEW).rows)}


@given(sure=confidences, threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_what_is_above_the_threshold_and_the_best(sure: list[float], threshold: float) -> None:
    expected = {index for index, each in enumerate(sure) if each > threshold} | {sure.index(max(sure))}
    assert chosen(Threshold(threshold), sure) == expected


@given(sure=confidences, threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]), at_most=st.integers(1, 9))
def test_a_pace_keeps_the_most_confident_of_what_the_threshold_reveals(
    sure: list[float], threshold: float, at_most: int
) -> None:
    free, paced = chosen(Threshold(threshold), sure), chosen(Threshold(threshold, at_most), sure)
    assert paced <= free
    assert len(paced) == min(at_most, len(free))
    # nobody who was left out is surer, or as sure and earlier
    assert all((sure[kept], -kept) > (sure[left], -left) for kept in paced for left in free - paced)


def test_a_paced_block_takes_so_many_steps(tiny_model: Transformer) -> None:
    decoding = resolve_decoding(tiny_model.config, sub_block_size=4, stop_ids=())
    for at_most, expected in ((1, [1] * 4), (3, [3, 1]), (4, [4])):
        engine = Engine(tiny_model, decoder=Denoise(Threshold(0.0, at_most)), decoding=decoding)
        (completion,) = engine.generate([tuple(range(5, 9))], max_new_tokens=4)
        assert [step.revealed for step in completion.steps if step.kind in DENOISING] == expected


def test_the_text_of_a_pace() -> None:
    assert parse_policy("threshold:at_most=2") == Threshold(at_most=2)
    assert parse_policy("threshold:at_most=none") == parse_policy("threshold") == Threshold()
    assert registry.describe(Threshold(0.5, 2)) == "threshold:threshold=0.5,at_most=2"
    assert parse_policy(registry.describe(Threshold())) == Threshold()


@pytest.mark.parametrize("text", ["threshold:at_most=0", "threshold:at_most=-1", "threshold:at_most=x"])
def test_a_wrong_pace_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="at_most"):
        parse_policy(text)
