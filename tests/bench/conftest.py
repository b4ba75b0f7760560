"""Experiments on a tiny model, for the tests of runs and of their shards."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.running import run
from tests.evaluation.tiny_folder import write_model_folder

EXPERIMENT = """\
question: Does it hold?
tasks: [mini_ifeval]
configs:
  - name: baseline
  - {name: same, rules: ["layer_reuse:k=1,layers=0,mode=output"]}
  - {name: output_0, rules: ["layer_reuse:k=3,layers=0,mode=output"]}
  - {name: output_1, rules: ["layer_reuse:k=3,layers=1,mode=output"]}
  - {name: trimmed, rules: ["window:refresh=block", "trim:level=changed"]}
baseline: baseline
model: {model}
batch_size: 1
chunk_samples: 2
decoding: {sub_block_size: 4}
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def write_experiment(tiny_model: Path) -> Callable[[Path], Path]:
    """Makes a folder an experiment on the tiny model, without results."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        (folder / "experiment.yaml").write_text(EXPERIMENT.replace("{model}", str(tiny_model)))
        return folder

    return write


PAIR, PAIR_LIMIT = ("baseline", "trimmed"), 6


@pytest.fixture(scope="session")
def finished_pair(tmp_path_factory: pytest.TempPathFactory, write_experiment: Callable[[Path], Path]) -> Path:
    """An experiment of two configs with its results on three chunks of two samples; to be copied, not changed."""
    folder = write_experiment(tmp_path_factory.mktemp("pair") / "experiment")
    path = folder / "experiment.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "layer_reuse" not in line))
    run(folder, PAIR_LIMIT)
    return folder
