"""Any shape of model with any rules, policy, decoder, caches and requests: the kernels give an answer or one line."""

import random
from typing import Any

import pytest
import torch

from stepsaver.engine.decoders.chosen import chosen_decoder
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.defaults import ESTIMATORS, KINDS_OF_WEIGHTS
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from tests.conftest import tiny_config
from tests.engine.rule_cases import ACTING, COMBINED, NEUTRAL

RULES: list[tuple[str, ...]] = [
    (),
    *((text,) for group in (*ACTING.values(), *NEUTRAL.values()) for text in group),
    *COMBINED,
]
POLICIES = ["threshold", "threshold:threshold=0.1", "fixed:count=3", "factor:factor=1.5", "quota:steps=3"]
DECODERS = ["block"] * 6 + ["autoregressive", "speculative:positions=20", "speculative:positions=0,span=5"]


def drawn_config(draw: random.Random) -> ModelConfig:
    kv_heads, head_dim = draw.choice([1, 2, 3]), draw.choice([2, 8, 8, 16, 24, 64, 128])
    own: dict[str, Any] = {}
    if draw.random() < 0.4:
        own = {"architecture": "SDARForCausalLM", "predicts": "self", "head_norms": True, "qkv_bias": False}
    return tiny_config(
        layers=draw.choice([1, 2, 5]),
        hidden=draw.choice([5, 16, 31, 32, 64, 96]),
        heads=kv_heads * draw.choice([1, 2, 5]),
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=draw.choice([1, 7, 32, 48, 100]),
        vocab=draw.choice([5, 33, 61, 130]),
        max_positions=draw.choice([64, 300, 1500]),
        block_size=draw.choice([1, 2, 4, 8, 16, 32]),
        tied=draw.random() < 0.5,
        **own,
    )


def drawn_engine(draw: random.Random, model: Transformer) -> Engine:
    size = model.config.block_size
    assert size is not None
    decode = draw.choice(DECODERS)
    decoding = resolve_decoding(
        model.config,
        sub_block_size=draw.choice([each for each in (1, 2, 4, 8, 16, 32) if size % each == 0]),
        prefix_cache=draw.random() < 0.9,
        block_cache=draw.random() < 0.8,
        join=draw.choice(["on", "off", "auto"]),
    )
    options = {"rules": draw.choice(RULES), "policy": draw.choice(POLICIES)} if decode == "block" else {}
    decoder = chosen_decoder(decode, **options)  # type: ignore[arg-type]
    return Engine(model, decoder=decoder, decoding=decoding, batch_size=draw.choice([1, 2, 3, 7]))


def drawn_ids(draw: random.Random, model: Transformer, longest: int) -> tuple[int, ...]:
    return tuple(draw.randrange(3, model.config.vocab) for _ in range(draw.randrange(1, longest)))


def random_weights(config: ModelConfig, dtype: torch.dtype, **options: Any) -> Transformer:
    return random_model(config, dtype=dtype, seed=config.hidden, stored=torch.float16, **options)


def answered(draw: random.Random, model: Transformer) -> bool:
    """Decodes, or scores as an equal model in double precision does; False: it was refused."""
    longest = draw.choice([4, 40, model.config.max_positions - 40])
    try:
        engine = drawn_engine(draw, model)
        if draw.random() < 0.6:
            prompts = [drawn_ids(draw, model, longest) for _ in range(draw.randrange(1, 9))]
            limit = draw.randrange(1, 40)
            sampling = Sampling(draw.choice([0.0, 0.0, 0.9]), top_p=draw.choice([1.0, 0.5]), seed=draw.randrange(9))
            done = list(engine.generate(prompts, max_new_tokens=limit, sampling=sampling))
            assert sorted(each.index for each in done) == list(range(len(prompts)))
            assert all(each.ids and len(each.ids) <= limit and max(each.ids) < model.config.vocab for each in done)
        else:
            pairs = [(drawn_ids(draw, model, longest), drawn_ids(draw, model, 30)) for _ in range(draw.randrange(1, 9))]
            estimator, requests = draw.choice(ESTIMATORS), [ScoreRequest(*pair) for pair in pairs]
            found = {each.index: each.loglikelihood for each in engine.score(requests, estimator=estimator)}
            assert sorted(found) == list(range(len(pairs)))
            if engine.check_estimator(estimator) != "trajectory":
                doubled = random_weights(model.config, torch.float64)
                exact = Engine(doubled, decoder=engine.decoder, decoding=engine.decoding)
                known = {each.index: each.loglikelihood for each in exact.score(requests, estimator=estimator)}
                assert found == pytest.approx(known, rel=2e-3, abs=2e-3)
    except UsageError as error:
        refusal = str(error)
    else:
        return True
    assert "\n" not in refusal
    return False


@pytest.mark.parametrize("tries", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_random_configurations_are_answered(tries: int) -> None:
    draw = random.Random(tries)
    count = 0
    for _ in range(tries):
        model = random_weights(drawn_config(draw), torch.float32, weights=draw.choice(KINDS_OF_WEIGHTS))
        count += answered(draw, model)
    assert count > 0.4 * tries
