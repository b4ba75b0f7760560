"""SDAR: token for token and forward for forward what its public decoder produced, for a part of its cases that is here
and all of those in the shared folder.
"""

from copy import deepcopy
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stepsaver.engine import registry
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.policies.quota import Quota
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import SELF, positions_between
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import DENOISING
from tests.conftest import SHARED, TESTS
from tests.engine.frozen import model_named
from tests.engine.golden_cases import read_golden
from tests.engine.rule_cases import ACTING, combined_rule_sets, rule_sets
from tests.engine.test_score import plain_logits

FOLDERS = [TESTS / "golden_sdar", SHARED / "golden_sdar" / "untied-b4", SHARED / "golden_sdar" / "tied-b8"]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest) -> tuple[Path, Transformer]:
    if not request.param.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    return request.param, load_model(request.param, dtype=torch.float32)


def settings_of(case: dict) -> tuple:
    return case["block_size"], case["denoising_steps"], case["threshold"] or -1.0, case["stop_token"]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_every_case_equals_the_public_decoder(golden: tuple[Path, Transformer], batch_size: int) -> None:
    folder, model = golden
    for (block_size, steps, threshold, stop), group in groupby(
        sorted(read_golden(folder)["cases"], key=settings_of), key=settings_of
    ):
        cases = list(group)
        decoding = resolve_decoding(model.config, block_size=block_size, stop_ids=(stop,))
        policy = Quota(steps, None if threshold < 0 else threshold)
        engine = Engine(model, decoder=Denoise(policy), decoding=decoding, batch_size=batch_size, checked=True)
        prompts = [Prompt(tuple(case["prompt"]), max_new_tokens=case["max_new_tokens"]) for case in cases]
        found = list(engine.generate(prompts, max_new_tokens=0))
        assert len(found) == len(cases)
        for completion in found:
            case = cases[completion.index]
            ids = case["output"][len(case["prompt"]) :][: case["max_new_tokens"]]
            assert completion.ids == (ids[: ids.index(stop) + 1] if stop in ids else ids), case["prompt"]
            ours = [[step.kind, step.rows] for step in completion.steps]
            assert ours == case["trace"][: len(ours)], case["prompt"]  # the reference goes on to the end of its canvas


def test_plain_logits(golden: tuple[Path, Transformer]) -> None:
    folder, model = golden
    stored = load_file(folder / "forward.safetensors")
    ids = stored["ids"].flatten().numpy()
    rows, size = len(ids), model.config.block_size
    assert size is not None
    cache = KeyValueCache(model.config, slots=1, capacity=rows, dtype=model.dtype, device=model.device)
    everything = positions_between(0, rows)
    plan = whole_plan("prefill", window=everything, reads=everything, layers=model.config.layers, prediction=SELF)
    logits = run_step(model, Memory(cache, None, model.rotations(rows)), [Step(0, 0, ids, size, plan)]).logits
    assert torch.allclose(logits, stored["logits"].view_as(logits), atol=1e-4, rtol=0)


SETS_WITHOUT_SHIFT = [
    rules for rules in rule_sets(ACTING) + combined_rule_sets() if not any(rule.needs_shift for rule in rules)
]
PROMPTS = [(5, 6, 7), tuple(range(10, 26)), (9,), tuple(range(20, 31))]


@pytest.fixture(scope="module")
def tiny_sdar() -> Transformer:
    return model_named("self")


def tiny_engine(model: Transformer, rules: tuple = (), *, batch_size: int = 1, threshold: float = 0.5, **options):
    decoding = resolve_decoding(model.config, **({"sub_block_size": 4, "stop_ids": ()} | options))
    return Engine(
        model, decoder=Denoise(Threshold(threshold), rules), batch_size=batch_size, decoding=decoding, checked=True
    )


def texts(engine: Engine, limit: int = 28) -> list[list[int]]:
    return [each.ids for each in sorted(engine.generate(PROMPTS, max_new_tokens=limit), key=lambda each: each.index)]


@pytest.mark.parametrize("sub_block_size", [4, 8])
@pytest.mark.parametrize("block_cache", [True, False])
def test_cached_decoding_is_decoding_without_caches(
    tiny_sdar: Transformer, sub_block_size: int, block_cache: bool
) -> None:
    options = {"sub_block_size": sub_block_size, "block_cache": block_cache}
    assert texts(tiny_engine(tiny_sdar, batch_size=3, **options)) == texts(
        tiny_engine(tiny_sdar, prefix_cache=False, **options)
    )


@pytest.mark.parametrize("rules", SETS_WITHOUT_SHIFT, ids=lambda rules: "+".join(map(registry.describe, rules)))
def test_rules_without_the_shift_run_checked_and_alike_in_batches(tiny_sdar: Transformer, rules: tuple) -> None:
    alone = texts(tiny_engine(tiny_sdar, rules))
    assert [len(ids) for ids in alone] == [28] * len(PROMPTS)
    assert texts(tiny_engine(tiny_sdar, rules, batch_size=3)) == alone
    assert texts(tiny_engine(deepcopy(tiny_sdar).float().prepare(), rules, batch_size=2)) == alone


def test_what_follows_from_the_shift_is_refused_in_one_line(tiny_sdar: Transformer) -> None:
    with pytest.raises(UsageError, match="rule window needs positions that predict the token after them"):
        tiny_engine(tiny_sdar, (parse_rule("window"),))


def test_a_score_is_that_of_the_tokens_own_row(tiny_sdar: Transformer) -> None:
    context = tuple(range(5, 16))  # one whole block, and three rows of the next
    blocks = torch.arange(16) // 8
    logits = plain_logits(tiny_sdar, [*context, *[1] * 5], blocks[:, None] >= blocks[None])
    asked = [ScoreRequest(context, (token,)) for token in (7, 9, 30)]
    scores = sorted(tiny_engine(tiny_sdar, batch_size=2).score(asked), key=lambda each: each.index)
    for score, request in zip(scores, asked, strict=True):
        expected = logits[len(context)].log_softmax(-1)[request.continuation_ids[0]]
        assert score.loglikelihood == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("sub_block_size", [4, 8])
def test_scores_follow_the_trajectory_of_the_models_own_text(tiny_sdar: Transformer, sub_block_size: int) -> None:
    engine = tiny_engine(tiny_sdar, threshold=0.7, sub_block_size=sub_block_size)
    prompt = tuple(range(5, 21))
    completion = next(iter(engine.generate([prompt], max_new_tokens=16)))
    (score,) = engine.score([ScoreRequest(prompt, tuple(completion.ids))])
    assert score.is_greedy
    assert score.steps == sum(step.kind in DENOISING for step in completion.steps)
    (uncached,) = tiny_engine(tiny_sdar, threshold=0.7, sub_block_size=sub_block_size, prefix_cache=False).score(
        [ScoreRequest(prompt, tuple(completion.ids))]
    )
    assert uncached.loglikelihood == pytest.approx(score.loglikelihood, abs=1e-9)
