"""What calibration measures and proposes, on the tiny model."""

import pytest
import torch

from benchmarks.drift import calibrate
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.rules.layer_reuse import group_size, layer_group
from tests.conftest import sharpened, tiny_config

PROMPTS = [Prompt((5, 6, 7)), Prompt((9,))]


def engine_of(model: Transformer, block_size: int) -> Engine:
    return Engine(model, decoding=resolve_decoding(model.config, block_size=block_size, stop_ids=()))


def test_the_proposed_layers_are_as_many_as_the_named_groups_have() -> None:
    model = sharpened(random_model(tiny_config(layers=7), dtype=torch.float64, seed=5))
    document = calibrate(engine_of(model, 8), PROMPTS, max_new_tokens=24)
    proposed = layer_group(document["calibrated"], 7)
    assert len(proposed) == group_size(7) == len(layer_group("first", 7)) == 3
    drift = [document["drift"]["attention"][layer][0][0] for layer in range(6)]
    assert all(0 < each < 10 for each in drift)


def test_blocks_of_one_row_have_no_drift(golden_model: Transformer) -> None:
    with pytest.raises(UsageError, match="no block took a second step"):
        calibrate(engine_of(golden_model, 1), PROMPTS, max_new_tokens=4)
