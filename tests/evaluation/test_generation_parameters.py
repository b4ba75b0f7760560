"""Generation keywords mean what they mean to the harness."""

from typing import Any

import pytest
from lm_eval.models.utils import normalize_gen_kwargs

from stepsaver.engine.errors import UsageError
from stepsaver.engine.sampling import Sampling
from stepsaver.evaluation.answering import read_parameters


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"until": "stop"},
        {"until": ["a", "b"], "max_gen_toks": 7},
        {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": 1280},
        {"max_new_tokens": 5},
        {"max_tokens": 6, "max_gen_toks": 4},
        {"do_sample": False, "temperature": 0.7},
        {"temperature": 0.7},
        {"do_sample": True, "temperature": 0.5, "top_p": 0.9},
    ],
)
def test_as_the_harness_reads_them(keywords: dict[str, Any]) -> None:
    theirs = normalize_gen_kwargs(dict(keywords), 256)
    ours = read_parameters(keywords, default_new_tokens=256)
    assert list(ours.until) == theirs["until"]
    assert ours.max_new_tokens == theirs["max_gen_toks"]
    assert ours.sampling.is_greedy == (not theirs["do_sample"])
    if theirs["do_sample"]:
        assert ours.sampling.temperature == theirs["temperature"]


def test_sampling() -> None:
    keywords = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    assert read_parameters(keywords, default_new_tokens=1).sampling == Sampling(0.5, 0.9, 3)
    assert read_parameters({"do_sample": True}, default_new_tokens=1).sampling.temperature == 1.0


def test_what_we_cannot_do_is_said() -> None:
    with pytest.raises(UsageError, match="num_beams, top_k are not supported"):
        read_parameters({"top_k": 5, "num_beams": 2}, default_new_tokens=1)


def test_a_top_p_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"top-p 0\.0 is outside"):
        read_parameters({"do_sample": True, "temperature": 0.5, "top_p": 0}, default_new_tokens=8)
