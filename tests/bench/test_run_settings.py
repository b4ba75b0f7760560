"""What a command line or a config says instead of the file: it reaches the engine, the identity and the summary."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepsaver.cli import main
from tests.bench.running import invalid, run
from tests.bench.tampering import edit_json
from tests.evaluation.own_rows import write_rows

CONFIGS = """\
configs:
  grid: {threshold: [0.5, 0.95], block_cache: [true, false]}
  name: t{threshold}_{block_cache}
  threshold: "{threshold}"
  block_cache: "{block_cache}"
baseline: t0.5_True
"""


@pytest.fixture
def experiment(tmp_path: Path, write_experiment: Callable[[Path], Path]) -> Path:
    """Without results: two configs."""
    folder = write_experiment(tmp_path / "experiment")
    path = folder / "experiment.yaml"
    lines = [line for line in path.read_text().splitlines() if "output_" not in line and "same" not in line]
    path.write_text("\n".join(lines) + "\n")
    return folder


def summary_of(experiment: Path, config: str, folder: str = "mini_ifeval_limit_2") -> dict[str, Any]:
    return json.loads((experiment / "results" / folder / config / "summary.json").read_text())


def test_options_are_in_the_identity_and_the_summary(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--threshold", "0.6", "--batch-size", "1", "--dtype", "float64", "--weights", "float32", "--device", "cpu"]
    flags += ["--max-new-tokens", "5", "--num-fewshot", "0", "--metric", "prompt_level_strict_acc,none"]
    run(experiment, 2)
    plain = summary_of(experiment, "baseline")
    run(experiment, 2, *flags)
    changed = summary_of(experiment, "baseline")
    wanted = {
        "policy": "threshold:threshold=0.6,at_most=none,strict=true",
        "batch_size": 1, "dtype": "torch.float64", "device": "cpu",
        "weights": "float32", "token_limit": 5, "num_fewshot": 0, "metric": "prompt_level_strict_acc,none",
    }  # fmt: skip
    for name, value in wanted.items():
        assert changed["eval_params"][name] == changed["identity"][name] == value, name
    assert plain["run_id"] != changed["run_id"]
    assert plain["throughput"]["tokens"] > changed["throughput"]["tokens"] == 10  # the task's own limit is 32
    assert invalid(experiment, 2) == []
    run(experiment, 2, *flags)
    assert summary_of(experiment, "baseline")["run_id"] == changed["run_id"]
    capsys.readouterr()
    assert main(["run", str(experiment), "--limit", "2", "--dry-run", "--json", *flags[2:]]) == 0
    (planned,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "run with another policy" in planned["cells"][0]["remark"]


def test_what_is_given_as_the_file_says_changes_nothing(experiment: Path) -> None:
    run(experiment, 2, "baseline")
    before = summary_of(experiment, "baseline")["run_id"]
    run(experiment, 2, "baseline", "--batch-size", "1", "--estimator", "trajectory", "--device", "cpu")
    assert summary_of(experiment, "baseline")["run_id"] == before


def test_a_policy_that_the_file_does_not_declare_is_a_fault(experiment: Path) -> None:
    """Unless the command line gave it, and then only that one."""
    run(experiment, 2, "--policy", "fixed:rows=2")
    assert invalid(experiment, 2) == []
    for path in experiment.rglob("run.json"):
        assert json.loads(path.read_text())["provenance"]["given"] == {"policy": "fixed:rows=2"}
        edit_json(path, lambda stored: stored["provenance"].update(given={}))
    found = invalid(experiment, 2)
    assert found
    assert all("did not run with the declared policy" in each for each in found)


def test_a_grid_over_thresholds_and_caches(experiment: Path) -> None:
    path = experiment / "experiment.yaml"
    before, _, after = path.read_text().partition("configs:")
    path.write_text(before + CONFIGS + after[after.index("model:") :])
    run(experiment, 2)
    found = {name: summary_of(experiment, name)["identity"] for name in ("t0.5_True", "t0.5_False", "t0.95_True")}
    effective = {name: (each["policy"], each["decoding"]["block_cache"]) for name, each in found.items()}
    assert effective == {
        "t0.5_True": ("threshold:threshold=0.5,at_most=none,strict=true", True),
        "t0.5_False": ("threshold:threshold=0.5,at_most=none,strict=true", False),
        "t0.95_True": ("threshold:threshold=0.95,at_most=none,strict=true", True),
    }
    kinds = {name: set(summary_of(experiment, name)["cost"]["by_kind"]) for name in found}
    assert "sub" in kinds["t0.5_True"]
    assert "sub" not in kinds["t0.5_False"]
    assert invalid(experiment, 2) == []


def test_any_task_of_lm_eval_runs_if_its_metric_is_named(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With shots and a token limit, neither of which the task has of itself; and its report finds the questions."""
    data = write_rows(tmp_path / "data")
    command = ["run", str(experiment), "--task", "gsm8k_cot", "--limit", "2", "--data-dir", str(data)]
    assert main(command) == 2
    assert "name its metric with --metric, one of exact_match,strict-match" in capsys.readouterr().err
    flags = ["--metric", "exact_match,flexible-extract", "--max-new-tokens", "8", "--num-fewshot", "2"]
    run(experiment, 2, "--data-dir", str(data), *flags, "baseline", task="gsm8k_cot")
    found = summary_of(experiment, "baseline", "gsm8k_cot_limit_2")
    assert found["accuracy_metric"] == "exact_match,flexible-extract"
    assert found["eval_params"]["num_fewshot"] == 2
    page = ["report", str(experiment), "--task", "gsm8k_cot", "--limit", "2", "--data-dir", str(data)]
    assert main(page) == 0
    from stepsaver.bench.folders import find_experiment
    from stepsaver.report.artifacts import read_stored_task

    asked = find_experiment(str(experiment))
    task = read_stored_task(asked, experiment / "results", "gsm8k_cot", limit=2, model=asked.spec.model, data_dir=data)
    assert task is not None
    assert task.documents.why_not == ""
    assert len(task.done[0].scores) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-fewshot", "-1"], "--num-fewshot -1 is less than 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is less than 1"),
        (["--batch-size", "0"], "--batch-size 0 is less than 1"),
        (["--policy", "fixed:rows=2", "--threshold", "0.9"], "exclude each other"),
        (["--policy", "fixd"], "unknown policy 'fixd'"),
        (["--threshold", "7"], "threshold"),
        (["--dtype", "float8"], "dtype 'float8' is unknown"),
        (["--weights", "float8"], "unknown kind of weights 'float8'"),
        (["--device", "gpu"], "device 'gpu' is unknown"),
        (["--metric", "acc"], "has no metric 'acc'"),
        (["--num-fewshot", "3"], "0-shot task by definition"),
        (["--task", "no_such_task"], "unknown task"),
    ],
)
def test_wrong_settings_are_one_line(
    experiment: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(experiment), "--limit", "2", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
