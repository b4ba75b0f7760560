"""The checkpoint that ships with the package: it loads, repeats its recorded answers and is mostly right."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.evaluation.embedded import MODEL_FOLDER
from training.measure import checkpoint_tokenizer, measure_choices, measure_generation, read_documents
from training.problems.tokenizer import CHAT_TEMPLATE, MASK, build_tokenizer, prompt_text

GOLDEN_FILE = Path(__file__).parent / "embedded_golden.json"
GOLDEN_COUNT = 6


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(MODEL_FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return checkpoint_tokenizer(MODEL_FOLDER)


def decoded_ids(model: Transformer, tokenizer: Tokenizer, *, batch: int) -> list[list[int]]:
    """What the plain model answers to the first test problems."""
    documents = read_documents("mini_gsm8k", limit=GOLDEN_COUNT)
    prompts = [tokenizer.encode(prompt_text(document["question"])).ids for document in documents]
    engine = Engine(model, decoder=Denoise(Threshold(0.9)), batch_size=batch)
    found = {completion.index: completion.ids for completion in engine.generate(prompts, max_new_tokens=96)}
    return [found[index] for index in range(GOLDEN_COUNT)]


@pytest.mark.parametrize("batch", [1, GOLDEN_COUNT])
def test_the_checkpoint_decodes_what_it_did(model: Transformer, tokenizer: Tokenizer, batch: int) -> None:
    assert decoded_ids(model, tokenizer, batch=batch) == json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))


def test_most_of_a_hundred_problems_are_right(model: Transformer, tokenizer: Tokenizer) -> None:
    measured = measure_generation(model, tokenizer, "mini_gsm8k", threshold=0.9, limit=100)
    assert measured.share > 0.75
    assert measured.tokens_per_step >= 2


def test_the_other_tasks_are_clearly_above_chance(model: Transformer, tokenizer: Tokenizer) -> None:
    assert measure_generation(model, tokenizer, "mini_ifeval", threshold=0.9, limit=100).share > 0.6
    assert measure_choices(model, tokenizer, limit=100)["all subjects"].share > 0.6


def test_the_folder_has_the_tokenizer_of_the_generator(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert (MODEL_FOLDER / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


def test_special_tokens_agree_with_the_configuration(model: Transformer, tokenizer: Tokenizer) -> None:
    described = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert described["mask_token_id"] == tokenizer.token_to_id(MASK) == model.config.mask_id
    assert (described["eos_token_id"],) == model.config.stop_ids == (tokenizer.token_to_id("<|end|>"),)
    assert model.config.vocab == tokenizer.get_vocab_size()
    assert model.config.layers == 28


def test_the_package_stays_small() -> None:
    size = sum(path.stat().st_size for path in MODEL_FOLDER.parent.rglob("*") if path.is_file())
    assert size < 12e6
