"""The training recipe: layout, masks and loss against plain definitions, and runs that stop and go on."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Layer, Transformer
from training.__main__ import main
from training.batches import (
    MOST_BLOCKS,
    Sample,
    add_causal,
    add_clean,
    add_noisy,
    draw,
    encode,
    make_batch,
    variants,
)
from training.export import export_checkpoint
from training.layout import NO_TARGET, Sheet, Units
from training.loop import read_log, train
from training.network import initial_model, losses, unit_logits
from training.problems.tokenizer import END_ID, MASK_ID, build_tokenizer
from training.recipe import Recipe

VOCABULARY = 173
TINY = Recipe(
    layers=3,
    hidden=16,
    heads=2,
    mlp=24,
    autoregressive_steps=3,
    joint_steps=4,
    autoregressive_units=8,
    joint_units=32,
    warm_up_steps=2,
    save_every=2,
    check_every=3,
    finish_steps=2,
    threads=1,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def samples(tokenizer: Tokenizer) -> list[Sample]:
    random = Random(5)
    return [encode(draw(random, TINY, step=0, split="train"), tokenizer, block_size=32) for _ in range(12)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = TINY.model_config(vocab=VOCABULARY, mask_id=MASK_ID, stop_id=END_ID)
    return initial_model(config, seed=1, deviation=0.3).to(torch.float64)


@dataclass(frozen=True)
class Label:
    """What a unit is, said without the layout's tables."""

    sample: int
    copy: str  # causal, clean, or a name of its own for every noisy variant
    block: int


def laid_out(samples: list[Sample]) -> tuple[Units, list[Label]]:
    sheet, labels, random = Sheet(32, MOST_BLOCKS), [], Random(6)
    for number, sample in enumerate(samples):
        add_causal(sheet, sample, TINY)
        labels += [Label(number, "causal", block) for block in range(sample.blocks)]
        clean = add_clean(sheet, sample)
        labels += [Label(number, "clean", block) for block in range(sample.blocks - 1)]
        for block in range(sample.answer_start // 32, sample.blocks):
            for masked, weights in variants(sample, block, TINY, random):
                add_noisy(sheet, sample, block, masked, weights, earlier=clean[:block])
                labels.append(Label(number, f"noisy {len(labels)}", block))
    return sheet.units(len(sheet) + 2), labels


def sees(query: Label, query_row: int, key: Label, key_row: int) -> bool:
    """The definition: causal rows see the causal past; all others see clean earlier blocks and their own block."""
    if query.sample != key.sample:
        return False
    if query.copy == "causal":
        return key.copy == "causal" and key.block * 32 + key_row <= query.block * 32 + query_row
    if query == key:
        return True
    return key.copy == "clean" and key.block < query.block


def test_every_row_sees_exactly_what_the_definition_says(samples: list[Sample]) -> None:
    units, labels = laid_out(samples[:3])
    count, rows = units.tokens_UR.shape
    mask = units.mask().view(count, rows, MOST_BLOCKS, rows)
    for unit, query in enumerate(labels):
        seen = torch.zeros(rows, len(labels) + 2, rows, dtype=torch.int64)
        for place, other in enumerate(units.context_UC[unit].tolist()):
            seen[:, other] += mask[unit, :, place]
        expected = torch.tensor(
            [[[sees(query, i, key, j) for j in range(rows)] for key in labels] for i in range(rows)], dtype=torch.int64
        )
        assert torch.equal(seen[:, : len(labels)], expected), query
        assert not seen[:, len(labels) :].any()


def plain_logits(model: Transformer, tokens: list[int], mask: Tensor) -> Tensor:
    """The network on one sequence with a square mask, in the plainest way."""
    table = model.rotations(len(tokens))
    h = model.embedding(torch.tensor(tokens))
    for layer in model.layers:
        assert isinstance(layer, Layer)
        q, k, v = layer.attention.project_rotated(h, table)
        scores = torch.einsum("qhe,khe->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        h = h + layer.attention.finish(torch.einsum("hqk,khe->qhe", weights, v).flatten(-2))
        h = h + layer.mlp(h)
    return model.logits(h)


def test_packed_units_give_the_logits_of_decoding(samples: list[Sample], model: Transformer) -> None:
    """A noisy unit equals a block-causal forward over the clean earlier blocks and the partly masked block."""
    units, labels = laid_out(samples[:4])
    with torch.no_grad():
        packed = unit_logits(model, units)
        for unit, label in enumerate(labels):
            earlier = samples[label.sample].tokens[: label.block * 32]
            tokens = earlier + units.tokens_UR[unit].tolist()
            position = torch.arange(len(tokens))
            block = position if label.copy == "causal" else position // 32
            plain = plain_logits(model, tokens, block[:, None] >= block[None, :])
            torch.testing.assert_close(packed[unit], plain[-32:], rtol=1e-9, atol=1e-9)


def test_losses_are_means_over_weights(samples: list[Sample], model: Transformer) -> None:
    units, labels = laid_out(samples[:4])
    with torch.no_grad():
        found = losses(model, units)
        packed = unit_logits(model, units).float().log_softmax(-1)
    totals = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for unit, label in enumerate(labels):
        for row in range(32):
            weight = units.weights_UR[unit, row].item()
            if weight:
                target = int(units.targets_UR[unit, row])
                total = totals[label.copy == "causal"]
                total[0] -= weight * packed[unit, row, target].item()
                total[1] += weight
    assert found.autoregressive.item() == pytest.approx(totals[True][0] / totals[True][1], rel=1e-5)
    assert found.diffusion.item() == pytest.approx(totals[False][0] / totals[False][1], rel=1e-5)


def test_targets_are_the_next_tokens_and_only_answers_count(samples: list[Sample]) -> None:
    units, labels = laid_out(samples)
    for unit, label in enumerate(labels):
        sample = samples[label.sample]
        for row in range(32):
            position = label.block * 32 + row + 1
            target, weight = int(units.targets_UR[unit, row]), units.weights_UR[unit, row].item()
            assert target == (sample.tokens[position] if position < len(sample.tokens) else NO_TARGET)
            if weight:
                assert position >= sample.answer_start
                if label.copy.startswith("noisy"):
                    assert units.tokens_UR[unit, row + 1] == MASK_ID
                if label.copy == "clean":
                    assert row == 31


def test_masks_are_those_of_decoding_or_complementary(samples: list[Sample]) -> None:
    recipe, random = replace(TINY, complementary_share=1.0), Random(9)
    for sample in samples * 20:
        for block in range(sample.answer_start // 32, sample.blocks):
            found = variants(sample, block, recipe, random)
            if not found:
                continue
            first = max(1, sample.answer_start - block * 32)
            *decoding, part, rest = (masked for masked, _ in found)
            assert all(not any(masked[:first]) for masked in (*decoding, part, rest))
            assert [one + other for one, other in zip(part, rest, strict=True)] == [row >= first for row in range(32)]
            for masked in decoding:
                current = masked.index(True) // 8
                later = masked[8 * (current + 1) :]
                assert all(later)
                assert 8 * current < sample.answer_end - block * 32  # decoding stops at the stop token


def test_samples_end_with_a_stop_token_and_whole_blocks(samples: list[Sample]) -> None:
    for sample in samples:
        assert len(sample.tokens) % 32 == 0
        assert sample.blocks <= MOST_BLOCKS
        assert sample.answer_start < sample.answer_end <= len(sample.tokens)
        assert set(sample.tokens[sample.answer_end - 1 :]) == {END_ID}
        assert END_ID not in sample.tokens[sample.answer_start : sample.answer_end - 1]


def test_batches_depend_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    def batch(step: int, seed: int = 0) -> Tensor:
        return make_batch(replace(TINY, seed=seed), tokenizer, step=step, stage="joint").tokens_UR

    assert torch.equal(batch(4), batch(4))
    assert not torch.equal(batch(4), batch(5))
    assert not torch.equal(batch(4), batch(4, seed=1))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", TINY, compiled=False)
    train(tmp_path / "parts", TINY, until=3, compiled=False)
    train(tmp_path / "parts", TINY, resume=True, until=5, compiled=False)
    parts = train(tmp_path / "parts", TINY, resume=True, compiled=False)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name
    curves = [[{**line, "seconds": 0} for line in read_log(tmp_path / run)] for run in ("whole", "parts")]
    assert len(curves[0]) == TINY.steps
    for one, other in zip(*curves, strict=True):
        one.pop("held_out", None)
        other.pop("held_out", None)
        assert one == other


def test_the_loss_goes_down(tmp_path: Path) -> None:
    recipe = replace(TINY, autoregressive_steps=20, joint_steps=10, warm_up_steps=5, rates=((0, 1e-2),))
    train(tmp_path, recipe, compiled=False)
    lines = read_log(tmp_path)
    assert lines[19]["autoregressive"] < 0.8 * lines[0]["autoregressive"]
    assert lines[0]["diffusion"] == 0.0
    assert lines[-1]["diffusion"] < lines[20]["diffusion"]


def test_only_the_length_of_a_run_may_change(tmp_path: Path) -> None:
    train(tmp_path, TINY, until=2, compiled=False)
    with pytest.raises(UsageError, match="holds a training already"):
        train(tmp_path, TINY, compiled=False)
    with pytest.raises(UsageError, match="another seed"):
        train(tmp_path, replace(TINY, seed=1), resume=True, compiled=False)
    with pytest.raises(UsageError, match="another autoregressive_steps"):
        train(tmp_path, replace(TINY, autoregressive_steps=1), resume=True, compiled=False)
    longer = train(tmp_path, replace(TINY, joint_steps=5), resume=True, compiled=False)
    assert longer.step == 8
    with pytest.raises(UsageError, match="no training to resume"):
        train(tmp_path / "nowhere", TINY, resume=True, compiled=False)


def test_the_rate_is_constant_until_the_decay_and_ends_low() -> None:
    rates = ((0, 2e-3), (100, 1e-3))
    recipe = Recipe(
        autoregressive_steps=100,
        joint_steps=100,
        warm_up_steps=10,
        rates=rates,
        decay_start=150,
        decay_steps=60,
        finish_steps=20,
    )
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[:10] == pytest.approx([2e-3 * (step + 1) / 10 for step in range(10)])
    assert set(rates[10:100]) == {2e-3}
    assert set(rates[100:150]) == {1e-3}
    assert rates[150:] == sorted(rates[150:], reverse=True)
    longer = replace(recipe, joint_steps=200)
    assert [longer.rate(step) for step in range(180)] == rates[:180]
    assert rates[-1] < 1.1 * recipe.final_rate + 1e-6


def test_an_exported_checkpoint_gives_the_same_logits(tmp_path: Path, samples: list[Sample]) -> None:
    config = TINY.model_config(vocab=VOCABULARY, mask_id=MASK_ID, stop_id=END_ID)
    model = initial_model(config, seed=2, deviation=0.1)
    export_checkpoint(model, tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32)
    assert replace(loaded.config, stored_dtype="float32") == config
    units, _ = laid_out(samples[:2])
    with torch.no_grad():
        one, other = unit_logits(model, units), unit_logits(loaded, units)
    assert F.mse_loss(one, other).sqrt() < 2e-3 * one.std()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_command_line_refuses_what_it_cannot_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "no training to resume" in capsys.readouterr().err
