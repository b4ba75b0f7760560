"""What all tests share: one thread, the golden checkpoint, tiny models, and the folder beside the repository."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from stepsaver.engine.curve import Curve
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.rope import Rope
from stepsaver.engine.models.transformer import Transformer

torch.set_num_threads(1)

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
SHARED = TESTS.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def golden_model() -> Transformer:
    return load_model(GOLDEN, dtype=torch.float32)


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": "Fast_dLLM_QwenForCausalLM",
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp": 48,
        "vocab": 61,
        "rope": Rope(theta=1e4),
        "max_positions": 512,
        "qkv_bias": True,
        "block_size": 8,
        "mask_id": 1,
        "stop_ids": (2,),
        "bos_id": 3,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_model() -> Transformer:
    """Random weights in float64, large enough that confidences spread over (0, 1)."""
    return sharpened(random_model(tiny_config(), dtype=torch.float64, seed=5))


def sharpened(model: Transformer, factor: float = 25.0) -> Transformer:
    """Scales the weights of a random model so that its outputs depend on their inputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(factor if name.startswith(("head", "embedding")) else factor / 2)
    return model.prepare()


def straight_curve(forward: float, position: float = 1.0, context: float = 0.0) -> Curve:
    """A made-up device: a forward costs something, and so does each of its positions, and each token before them."""
    positions, contexts = (1, 32, 64), (0, 128)
    table = tuple(tuple(forward + position * count + context * seen for count in positions) for seen in contexts)
    return Curve("made up", "float32", 1, "small", 1, positions, contexts, table)
