"""lm-eval's own command line with our model in it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.registry import get_model

from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.factor import Factor
from stepsaver.engine.policies.policy import parse_policy, policy_text
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.evaluation import lm_eval_cli
from stepsaver.evaluation.embedded import TASKS_FOLDER
from stepsaver.evaluation.lm_eval_cli import ModelArguments, RegisteredLM, main, read_arguments
from tests.evaluation.tiny_folder import write_model_folder


def test_the_model_is_registered_and_lm_evals_own_are_still_known() -> None:
    assert get_model("stepsaver") is RegisteredLM
    assert get_model("dummy") is not RegisteredLM


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pretrained": "m"}, ModelArguments("m")),
        ({"pretrained": "m", "batch_size": "4"}, ModelArguments("m", batch_size=4)),
        ({"pretrained": "m", "threshold": 0.7}, ModelArguments("m", threshold=0.7)),
        ({"pretrained": "m", "rules": ["trim", "window"]}, ModelArguments("m", rules="trim;window")),
    ],
)
def test_model_arguments(given: dict[str, Any], expected: ModelArguments) -> None:
    assert read_arguments(given) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "needs pretrained"),
        ({"pretrained": "m", "treshold": 1}, "nearest: threshold"),
        ({"pretrained": "m", "estimator": "trajectry"}, "nearest: trajectory"),
        ({"pretrained": "m", "batch_size": "auto"}, "not a whole number"),
        ({"pretrained": "m", "block_size": "four"}, "not a whole number"),
    ],
)
def test_wrong_model_arguments(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_arguments(given)


def test_rules() -> None:
    several = ModelArguments("m", rules="[layer_reuse:k=2,layers=middle;trim:level=changed]")
    assert several.rule_texts == ["layer_reuse:k=2,layers=middle", "trim:level=changed"]
    assert ModelArguments("m").rule_texts == []


@pytest.mark.parametrize(
    ("policy", "threshold", "expected"),
    [
        (None, None, Threshold()),
        (None, 0.5, Threshold(0.5)),
        ("threshold", 0.5, Threshold(0.5)),
        ("factor:factor=2", None, Factor(2.0)),
    ],
)
def test_a_policy_or_only_a_threshold(policy: str | None, threshold: float | None, expected: object) -> None:
    assert parse_policy(policy_text(policy, threshold)) == expected


def test_a_policy_and_a_threshold_exclude_each_other() -> None:
    with pytest.raises(UsageError, match=r"policy 'factor' and threshold 0\.5 exclude each other"):
        policy_text("factor", 0.5)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["--tasks", "gsm8k", "--use_cache", "x"], "keys on the prompt alone"),
        (["--tasks", "gsm8k,gpqa_main_n_shot"], "reshuffles the choices"),
        (["run", "--tasks=gpqa_main_n_shot"], "; use `stepsaver run EXPERIMENT --task gpqa_main_n_shot`\n"),
        (["-t", "gpqa_diamond_n_shot"], "; use `stepsaver run EXPERIMENT --task gpqa_diamond_n_shot`\n"),
        (["--tasks", "gsm8k", "humaneval", "--limit", "1"], "--task humaneval --confirm-run-unsafe-code`\n"),
        (["--config", "tasks.yaml"], "task humaneval_instruct: lm-eval runs model-written programs without a sandbox"),
    ],
)
def test_what_would_be_wrong_is_refused(
    command: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is loaded, however the task is named; one line says which command runs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    Path("tasks.yaml").write_text("model: stepsaver\ntasks: [gsm8k, humaneval_instruct]\n", encoding="utf-8")
    monkeypatch.setattr(lm_eval_cli, "open_model", lambda *_, **__: pytest.fail("a model was opened"))
    assert main([*command, "--model", "stepsaver"]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert len(said.splitlines()) == 1


@pytest.mark.long
def test_a_run_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index of our own tasks only; the whole one takes half a minute and is lm-eval's business."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager",
        lambda **_: TaskManager(include_defaults=False, include_path=str(TASKS_FOLDER)),
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = write_model_folder(tmp_path / "model")
    arguments = [
        "--model", "stepsaver",
        "--model_args", f"pretrained={folder},threshold=0.8,max_gen_toks=16,rules=[layer_reuse:k=2,layers=0-1]",
        "--tasks", "mini_gsm8k", "--limit", "2", "--apply_chat_template", "--batch_size", "2",
        "--gen_kwargs", "max_gen_toks=16", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    monkeypatch.setattr(lm_eval_cli.sys, "argv", [])
    assert main(arguments) == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert "exact_match,strict-match" in json.loads(results.read_text())["results"]["mini_gsm8k"]
