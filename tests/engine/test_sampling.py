"""Proposals from logits, against plain definitions."""

import numpy as np
import pytest
import torch

from stepsaver.engine.errors import UsageError
from stepsaver.engine.sampling import NonFiniteLogits, Sampling, propose, uniform

MASK = 2
LOGITS = torch.tensor([[1.0, 3.0, 5.0, 2.0, -1.0], [0.0, 0.0, 9.0, 0.5, 0.0]], dtype=torch.float64)


def test_greedy_leaves_the_mask_out_of_the_arg_max_and_keeps_it_in_the_normaliser() -> None:
    proposals = propose(LOGITS.clone(), mask_id=MASK, sampling=Sampling(), uniforms=[])
    probabilities = LOGITS.softmax(-1)
    assert proposals.tokens.tolist() == [1, 3]
    assert np.allclose(proposals.confidence, [probabilities[0, 1], probabilities[1, 3]])


def test_draws_follow_the_tempered_distribution() -> None:
    """Sweeping the uniform number over [0, 1) gives every token its share of the mass without the mask."""
    sampling = Sampling(temperature=0.7)
    count = 4000
    logits = LOGITS[:1].expand(count, -1).clone()
    proposals = propose(
        logits, mask_id=MASK, sampling=sampling, uniforms=[(place + 0.5) / count for place in range(count)]
    )
    tempered = (LOGITS[0] / 0.7).softmax(-1)
    shares = np.bincount(proposals.tokens, minlength=5) / count
    others = tempered.clone()
    others[MASK] = 0
    assert np.allclose(shares, others / others.sum(), atol=1e-3)
    assert np.allclose(proposals.confidence, tempered[proposals.tokens])


def test_nucleus_is_renormalised() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9)
    proposals = propose(LOGITS[:1].clone(), mask_id=4, sampling=sampling, uniforms=[0.999])
    probabilities = LOGITS[0].softmax(-1)
    nucleus = probabilities[[2, 1]]  # 0.83 + 0.11 of the mass
    assert proposals.tokens.tolist() == [1]
    assert np.allclose(proposals.confidence, [nucleus[1] / nucleus.sum()])


def test_a_nucleus_of_the_mask_alone_falls_back_to_the_others() -> None:
    proposals = propose(LOGITS[1:].clone(), mask_id=MASK, sampling=Sampling(temperature=1.0, top_p=0.5), uniforms=[0.0])
    assert proposals.tokens.tolist() == [3]
    assert proposals.confidence[0] < 0.01


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_rows_are_named(bad: float) -> None:
    logits = LOGITS.clone()
    logits[1, 0] = bad
    with pytest.raises(NonFiniteLogits) as error:
        propose(logits, mask_id=MASK, sampling=Sampling(), uniforms=[])
    assert error.value.row == 1


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    numbers = [uniform(1, b"key", position, 0) for position in range(4000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert abs(np.var(numbers) - 1 / 12) < 0.01
    base = uniform(1, b"key", 5, 3)
    assert len({base, uniform(2, b"key", 5, 3), uniform(1, b"kez", 5, 3), uniform(1, b"key", 6, 3)}) == 4
    assert base == uniform(1, b"key", 5, 3)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(options: dict) -> None:
    with pytest.raises(UsageError):
        Sampling(**options)
