from pathlib import Path

import pytest

import stepsaver
from tests.evaluation.tiny_folder import write_model_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> stepsaver.Model:
    """Random weights and a byte tokenizer: texts hold characters of which a token has one byte."""
    return stepsaver.load(tiny_folder, dtype="float64")


@pytest.fixture(scope="session")
def embedded() -> stepsaver.Model:
    return stepsaver.load("embedded")
