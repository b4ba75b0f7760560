"""The embedded model through the whole path, offline: the scores are irrelevant here, the plumbing is not."""

from pathlib import Path

import pytest
import torch

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.embedded import MODEL_FOLDER
from stepsaver.evaluation.evaluate import EvaluationOptions, build_requests, evaluate_task
from stepsaver.evaluation.inert import acting_rules, inert_rules
from stepsaver.evaluation.model_source import read_mask_id, resolve_model
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.nltk_stand_in import write_punkt_tab

pytestmark = pytest.mark.skipif(not (MODEL_FOLDER / "config.json").exists(), reason="the embedded model is missing")
MMLU_DOCUMENTS = 24


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(resolve_model("embedded"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(resolve_model("embedded"))


def _engine(model: Transformer, *rules: str) -> Engine:
    mask_id = read_mask_id(MODEL_FOLDER) if model.config.mask_id is None else None
    decoding = resolve_decoding(model.config, mask_id=mask_id)
    return Engine(model, decoder=Denoise(rules=tuple(map(parse_rule, rules))), batch_size=8, decoding=decoding)


@pytest.mark.parametrize(
    ("name", "new_tokens"),
    [
        ("gsm8k", 32),
        ("mmlu_anatomy", 32),
        ("gpqa_main_n_shot", 32),
        pytest.param("minerva_math_algebra", 64, marks=pytest.mark.long),
        pytest.param("ifeval", 64, marks=pytest.mark.long),
        pytest.param("humaneval", 64, marks=pytest.mark.long),
    ],
)
def test_official_tasks_run_offline(
    name: str,
    new_tokens: int,
    model: Transformer,
    tokenizer: TextTokenizer,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    network_attempts: list[object],
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(write_punkt_tab(tmp_path))])
    task = load_task(name, TaskOptions(data_dir=data_dir, confirm_run_unsafe_code=True))
    lm = StepsaverLM(_engine(model), tokenizer, settings=AdapterSettings(default_new_tokens=new_tokens))
    result = evaluate_task(lm, task, EvaluationOptions(limit=1))
    assert 0.0 <= result.accuracy <= 1.0
    assert lm.meters[task.path].tokens > 0
    assert network_attempts == []


@pytest.mark.parametrize("name", ["mini_gsm8k", "mini_ifeval"])
def test_the_model_answers_its_own_tasks(name: str, model: Transformer, tokenizer: TextTokenizer) -> None:
    lm = StepsaverLM(_engine(model), tokenizer)
    assert evaluate_task(lm, load_task(name), EvaluationOptions(limit=8)).accuracy > 0.2


def _scored(model: Transformer, tokenizer: TextTokenizer, *rules: str) -> dict[object, RequestRecord]:
    records: list[RequestRecord] = []
    lm = StepsaverLM(_engine(model, *rules), tokenizer, on_record=records.append)
    evaluate_task(lm, load_task("mini_mmlu"), EvaluationOptions(limit=MMLU_DOCUMENTS))
    return {record.key: record for record in records}


def test_reuse_reaches_log_likelihoods(model: Transformer, tokenizer: TextTokenizer) -> None:
    """The source's finding: nine configs, one number. Here k=3 changes what takes several steps, and nothing else."""
    plain = _scored(model, tokenizer)
    reused = _scored(model, tokenizer, "layer_reuse:k=3,mode=output,layers=last")
    several = [key for key, record in plain.items() if record.denoising_steps >= 2]
    changed = [key for key in several if plain[key].loglikelihood != reused[key].loglikelihood]
    assert len(changed) > len(several) / 2
    single = [key for key, record in plain.items() if record.tokens == 1]
    assert single
    assert all(plain[key].loglikelihood == reused[key].loglikelihood for key in single)
    for group in ("first", "middle", "last"):
        same = _scored(model, tokenizer, f"layer_reuse:k=1,mode=output,layers={group}")
        assert all(plain[key].loglikelihood == same[key].loglikelihood for key in plain)


@pytest.mark.parametrize(("k", "reasons"), [(1, ["k=1 computes every step"]), (3, [])])
def test_inert_configs_are_named_before_they_run(
    k: int, reasons: list[str], model: Transformer, tokenizer: TextTokenizer
) -> None:
    engine = _engine(model, f"layer_reuse:k={k},mode=output")
    lm = StepsaverLM(engine, tokenizer)
    requests = build_requests(lm, load_task("mini_mmlu"), EvaluationOptions(limit=MMLU_DOCUMENTS))["mini_mmlu"]
    inert = inert_rules(engine.decoder.rules, lm.scored_lengths(requests), block_size=engine.decoding.block_size)
    assert [each.reason for each in inert] == reasons
    assert acting_rules(engine.decoder.rules, inert) == (engine.decoder.rules if k > 1 else ())
    assert lm.meters["scoring"].trace.records == []
