"""The experiments for the 7B model: they can be read without it, and planned where its configuration is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.folders import find_experiment
from stepsaver.evaluation.task_registry import find_declaration

NAMES = ("10_fast_dllm_v2_7b", "11_fast_dllm_v2_7b_batch_16")
TASKS = (
    *("gsm8k_boxed", "minerva_math_boxed", "ifeval", "humaneval_instruct"),
    *("mmlu", "mmlu_five_shot", "mmlu_continuation", "mmlu_generative_boxed"),
    *("gpqa_main_n_shot", "gpqa_main_cot_zeroshot"),
)


def stepsaver(*arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process that has no hub and nothing in its cache."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "stepsaver", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("name", NAMES)
def test_the_experiments_are_those_of_the_source_and_more(name: str) -> None:
    experiment = read_experiment(find_experiment(name).folder, layers=28)
    assert experiment.spec.tasks == TASKS
    assert all(find_declaration(task) for task in TASKS)
    grid = {f"k{k}_{layers}" for k in (1, 2, 3) for layers in ("first", "middle", "last")}
    assert grid < {config.name for config in experiment.configs}
    assert experiment.spec.resources.memory_gb == 64


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
def test_a_dry_run_without_the_model_says_what_it_lacks(name: str, tmp_path: Path) -> None:
    done = stepsaver("run", name, "--dry-run", home=tmp_path)
    assert done.returncode == 2
    *notes, error = done.stderr.splitlines()
    assert error.startswith("stepsaver: ")
    left_out = [f"note: {task} is left out: " for task in TASKS]
    assert all(any(note.startswith(each) for each in left_out) for note in notes)
    assert "is not in the local cache and the hub is out of reach" in done.stderr


def test_a_dry_run_needs_no_weights(shared: Path, tmp_path: Path) -> None:
    done = stepsaver(
        "run", NAMES[0], "--model", shared / "fast_dllm_v2_7b", "--data-dir", shared / "data",
        "--task", "gsm8k_boxed", "--limit", "16", "--dry-run", "--json", home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "k3_last" in done.stdout
    assert json.loads(done.stdout)
