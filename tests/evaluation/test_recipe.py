"""Recipes: read as they were written, refused in one line, and honest about where they come from."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stepsaver.cli import main
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.lm_eval_cli import RegisteredLM, with_recipe
from stepsaver.evaluation.recipe import Figure, MadeFor, Measured, Recipe, read_recipe, recipe_text, versions_here
from tests.evaluation.tiny_folder import write_model_folder

MEASURED = Measured(
    measure="accuracy",
    task="mini_gsm8k_large",
    problems=5120,
    confidence=0.95,
    against="threshold:threshold=0.9",
    max_drop=1.0,
    speed_up=Figure(value=1.69, low=1.64, high=1.73),
    over_autoregressive=Figure(value=1.25, low=1.2, high=1.3),
    drop_points=Figure(value=0.4, low=-0.3, high=0.99),
)


def recipe_for(model: str, **changes: Any) -> Recipe:
    made_for = MadeFor(model=model, dtype="float32", device="cpu", machine="some processor", versions=versions_here())
    values: dict[str, Any] = {
        "rules": ("window:refresh=block", "trim:level=changed"),
        "policy": "threshold:threshold=0.8",
        "sub_block_size": 4,
        "join": "on",
        "batch_size": 2,
        "made_for": made_for,
        "measured": MEASURED,
    }
    return Recipe(**(values | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


def write(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe_text(recipe), encoding="utf-8")
    return path


def test_a_recipe_is_read_as_it_was_written_and_says_first_what_was_measured(tmp_path: Path) -> None:
    recipe = recipe_for("m")
    path = write(tmp_path, recipe)
    assert read_recipe(path) == recipe
    first = path.read_text().splitlines()[0]
    assert first == (
        "# 1.69x [1.64, 1.73] of plain decoding, 1.25x [1.20, 1.30] of autoregressive decoding, at a drop of "
        "0.40 [-0.30, 0.99] points on 5120 fresh problems of mini_gsm8k_large (95 % confidence)."
    )


def test_agreement_is_called_agreement() -> None:
    said = str(MEASURED.model_copy(update={"measure": "agreement", "over_autoregressive": None}))
    assert said.startswith("1.69x [1.64, 1.73] of plain decoding at a loss of agreement with plain decoding of 0.40 [")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[1, 2]", "no recipe: the file"),
        ("policy: threshold\nbatch_size: 1\nrule: []", "rule: unknown key"),
        ("policy: threshold", "batch_size: Field required"),
        ("policy: treshold\nbatch_size: 1", "nearest: threshold"),
        ("policy: threshold\nbatch_size: 1\nrules: ['trim:level=x']", "unknown trim: level|level"),
        ("policy: threshold\nbatch_size: 0", "batch_size"),
        ("policy: [", "is not YAML"),
        ("policy: threshold\nbatch_size: 1\njoin: some", "join"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=problem):
        read_recipe(path)


def test_a_recipe_says_what_is_not_as_it_was_measured() -> None:
    here: dict[str, Any] = {"model": "m", "dtype": "float32", "device": "cpu", "batch_size": 2}
    recipe = recipe_for("m")
    assert recipe.differences(**here) is None
    for name, other in {"model": "n", "dtype": "bfloat16", "device": "cuda", "batch_size": 1}.items():
        said = recipe.differences(**(here | {name: other}))
        assert said is not None
        assert f"(here {other})" in said
        assert "\n" not in said
    assert recipe.made_for is not None
    old = recipe.made_for.model_copy(update={"versions": {**versions_here(), "torch": "1.0"}})
    said = recipe.model_copy(update={"made_for": old}).differences(**here)
    assert said is not None
    assert f"torch 1.0 (here {torch.__version__.partition('+')[0]}" in said


def test_generate_decodes_by_the_recipe(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, recipe_for(model))
    prompt = ["generate", "--model", model, "--prompt", "5 6 7", "--ids", "--max-new-tokens", "8", "--json"]
    assert main([*prompt, "--recipe", str(path)]) == 0
    found = capsys.readouterr()
    engine = yaml.safe_load(found.out)["engine"]
    assert engine["batch_size"] == 2
    assert engine["policy"].startswith("threshold:threshold=0.8")
    assert [each.partition(":")[0] for each in engine["rules"]] == ["window", "trim"]
    assert engine["decoding"]["sub_block_size"] == 4
    assert engine["decoding"]["join"] == "on"
    assert "recipe" not in found.err
    assert main([*prompt, "--recipe", str(path), "--batch-size", "3"]) == 0
    assert "measured with batch size 2 (here 3)" in capsys.readouterr().err
    assert main([*prompt, "--recipe", str(path), "--threshold", "0.5"]) == 2
    assert "--recipe and --threshold exclude each other" in capsys.readouterr().err


def test_score_takes_a_recipe(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, requests = write(tmp_path, recipe_for(model)), tmp_path / "requests.jsonl"
    requests.write_text('{"context": "a b", "continuation": " c"}\n')
    command = ["score", "--model", model, "--requests", str(requests), "--json", "--recipe", str(path)]
    assert main(command) == 0
    assert yaml.safe_load(capsys.readouterr().out)["engine"]["decoding"]["sub_block_size"] == 4


def test_lm_eval_takes_a_recipe(model: str, tmp_path: Path) -> None:
    path = write(tmp_path, recipe_for(model))
    lm = RegisteredLM.create_from_arg_obj(
        {"pretrained": model, "recipe": str(path)}, {"batch_size": 1, "device": None, "max_batch_size": None}
    )
    assert lm.engine.batch_size == 2
    assert [rule.name for rule in lm.engine.decoder.rules] == ["window", "trim"]
    assert lm.engine.decoding.sub_block_size == 4
    with pytest.raises(UsageError, match="recipe and rules exclude each other"):
        with_recipe({"pretrained": model, "recipe": str(path), "rules": "trim"})


def test_run_compares_a_recipe_with_the_baseline(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.bench.conftest import EXPERIMENT

    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(EXPERIMENT.replace("{model}", model))
    path = write(tmp_path, recipe_for(model, sub_block_size=2))
    command = ["run", str(folder), "--limit", "2", "--max-new-tokens", "8", "--recipe", str(path)]
    assert main(command) in (0, 1)
    printed = capsys.readouterr().out
    assert "recipe " in printed
    stored = sorted(each.name for each in (folder / "results" / "mini_ifeval_limit_2").iterdir() if each.is_dir())
    assert stored == ["baseline", "recipe"]
    summary = yaml.safe_load((folder / "results" / "mini_ifeval_limit_2" / "recipe" / "summary.json").read_text())
    assert summary["eval_params"]["decoding"]["sub_block_size"] == 2
    assert summary["eval_params"]["rules"][0].startswith("window")


def test_the_python_interface_takes_a_recipe(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import stepsaver

    path = write(tmp_path, recipe_for(model))
    loaded = stepsaver.load(model)
    prompts = [[5, 6, 7], [9, 10]]
    ours = loaded.generate(prompts, recipe=path, max_new_tokens=8, ids=True)
    assert not caplog.messages
    rules = ["window:refresh=block", "trim:level=changed"]
    same = stepsaver.load(model, sub_block_size=4, join="auto")
    assert ours == same.generate(prompts, rules=rules, threshold=0.8, batch_size=2, max_new_tokens=8, ids=True)
    loaded.generate(prompts, recipe=path, batch_size=1, max_new_tokens=8, ids=True)
    assert "measured with batch size 2 (here 1)" in caplog.text
    with pytest.raises(UsageError, match="a recipe settles decoder, rules"):
        loaded.generate(prompts, recipe=path, rules="trim", ids=True)
