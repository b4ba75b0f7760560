"""`stepsaver.compare`: an experiment of the bench without its file. What it says is what the bench says."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import stepsaver
from stepsaver.cli import main
from stepsaver.extending import Rule

CONFIGS: dict[str, Any] = {"plain": [], "window": ["suffix_dropout", "trim"], "sure": {"threshold": 0.5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def comparison(embedded: stepsaver.Model, folder: Path) -> stepsaver.Comparison:
    return stepsaver.compare(embedded, "mini_gsm8k", CONFIGS, limit=8, batch_size=2, folder=folder)


def test_it_prints_as_a_table_with_its_verdict(comparison: stepsaver.Comparison) -> None:
    text = str(comparison)
    assert text.splitlines()[0] == "mini_gsm8k, 8 samples, embedded"
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["config", "plain", "window", "sure"]
    assert comparison.verdict.sentence in text
    assert repr(comparison) == text


def test_figures_have_intervals(comparison: stepsaver.Comparison) -> None:
    plain, window, sure, reference = comparison.configs
    assert (reference.name, reference.outcome) == ("autoregressive", "reference")
    assert window.over_reference is not None
    assert (plain.name, plain.outcome) == ("plain", "baseline")
    for config in (plain, window, sure):
        assert config.accuracy.low <= config.accuracy.value <= config.accuracy.high
        assert config.tokens_per_second is not None
        assert config.tokens_per_second.value > 0
    assert plain.drop_points.value == 0
    assert plain.speed_up.value == 1
    assert window.speed_up.low <= window.speed_up.value <= window.speed_up.high


def test_the_folder_is_an_experiment_that_the_commands_read(
    comparison: stepsaver.Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", str(comparison.folder), "--check", "--wide", "--task", "mini_gsm8k", "--limit", "8"])
    assert comparison.verdict.sentence in capsys.readouterr().out


def test_the_same_call_goes_on_from_what_is_stored(
    comparison: stepsaver.Comparison, embedded: stepsaver.Model, folder: Path
) -> None:
    stored = {path: path.read_bytes() for path in folder.rglob("samples.jsonl")}
    assert len(stored) == 4
    ran: list[str] = []
    again = stepsaver.compare(
        embedded,
        "mini_gsm8k",
        CONFIGS,
        limit=8,
        batch_size=2,
        folder=folder,
        progress=lambda config, *_: ran.append(config),
    )
    assert {path: path.read_bytes() for path in folder.rglob("samples.jsonl")} == stored
    assert [config.accuracy for config in again.configs] == [config.accuracy for config in comparison.configs]


def test_a_frame_has_a_row_per_config(comparison: stepsaver.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    frame = comparison.to_frame()
    assert list(frame.index) == ["plain", "window", "sure", "autoregressive"]
    assert frame.loc["window", "speed_up_low"] == comparison.configs[1].speed_up.low
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(stepsaver.UsageError, match=r"needs pandas: pip install 'stepsaver\[report\]'"):
        comparison.to_frame()


def test_the_report_is_a_page(comparison: stepsaver.Comparison, tmp_path: Path) -> None:
    page = comparison.report(tmp_path / "page.html")
    assert "mini_gsm8k" in page.read_text(encoding="utf-8")
    with pytest.raises(stepsaver.UsageError, match="cannot write"):
        comparison.report(tmp_path / "missing" / "page.html")


def test_a_rule_of_ones_own_is_compared_without_being_installed(embedded: stepsaver.Model) -> None:
    comparison = stepsaver.compare(embedded, "mini_gsm8k", {"plain": [], "own": Doubtful()}, limit=2)
    own = json.loads((comparison.folder / "results" / "mini_gsm8k_limit_2" / "own" / "run.json").read_text())
    assert own["identity"]["rules"] == ["doubtful:times=1"]
    assert own["identity"]["plugins"].keys() == {"doubtful"}
    temporary = comparison.folder
    del comparison
    assert not temporary.exists()


@dataclass(frozen=True)
class Doubtful(Rule):
    name: ClassVar[str] = "doubtful"
    times: int = 1

    def narrow(self, plan: Any, view: Any) -> Any:
        return plan


@dataclass(frozen=True)
class Impostor(Doubtful):
    name: ClassVar[str] = "trim"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"configs": {}}, "nothing to compare"),
        ({"task": "mini_gsm9k"}, "unknown task 'mini_gsm9k'; nearest: .*mini_gsm8k"),
        ({"limit": 0}, "limit 0 is not a whole number from 1 on"),
        ({"batch_size": 0}, "batch_size 0 is not a whole number from 1 on"),
        ({"model": "embedded"}, "'embedded' is no model: expected what stepsaver.load returns"),
        ({"task": 5}, "task 5 is not a text"),
        ({"configs": "trim"}, "configs 'trim' is no mapping"),
        ({"configs": {5: []}}, "configs: 5 is no name"),
        ({"configs": {"a": {"policy": Doubtful()}}}, "is no policy"),
        ({"configs": {"a": {"recipe": "x", "rules": []}}}, "config 'a': a recipe settles rules"),
        ({"configs": {"a": Path("no such")}}, "cannot read the recipe no such"),
        ({"success": {"confirm_if": {}}}, r"success\.reject_if: Field required"),
        ({"folder": 5}, "folder 5 is not the path of a folder"),
        ({"progress": 5}, "progress 5 is no function"),
        ({"baseline": "other"}, "baseline 'other' is no config"),
        ({"configs": {"a": ["trimm"]}}, "unknown rule 'trimm'"),
        ({"configs": {"a b": []}}, "^config 'a b': name: "),
        ({"configs": {"a": {"rulez": []}}}, "^config 'a': rulez: unknown key"),
        ({"configs": {"a": {"threshold": object()}}}, "holds what no file can"),
        ({"configs": {"a": [Impostor()]}}, "Impostor has the name 'trim', which another one of the rules has"),
    ],
)
def test_what_is_wrong_is_one_line(embedded: stepsaver.Model, wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"task": "mini_gsm8k", "configs": CONFIGS, "limit": 1} | wrong
    with pytest.raises(stepsaver.UsageError, match=message) as raised:
        stepsaver.compare(asked.pop("model", embedded), **asked)
    assert "\n" not in str(raised.value)
    assert "experiment.yaml" not in str(raised.value)


def test_a_recipe_is_a_config_and_the_criterion_is_said(embedded: stepsaver.Model, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rules: [trim]\njoin: auto\nbatch_size: 2\n")
    success = {
        "confirm_if": {"speed_up": "> 1.1", "drop_points": "< 3"},
        "reject_if": {"speed_up": "< 1", "drop_points": "> 30"},
    }
    configs = {"plain": [], "tuned": recipe, "also": {"recipe": recipe, "block_cache": True}}
    found = stepsaver.compare(embedded, "mini_gsm8k", configs, limit=np.int64(1), success=success)  # type: ignore[arg-type]
    stored = json.loads((found.folder / "results" / "mini_gsm8k_limit_1" / "tuned" / "run.json").read_text())
    assert [each.partition(":")[0] for each in stored["identity"]["rules"]] == ["trim"]
    assert stored["identity"]["decoding"]["join"] == "auto"
    assert "confirmed: speed-up > 1.1 and drop < 3 points" in str(found)
    assert "rejected: speed-up < 1 or drop > 30 points" in str(found)


def test_an_experiment_that_somebody_wrote_is_left_alone(embedded: stepsaver.Model, tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("question: mine\n")
    with pytest.raises(stepsaver.UsageError, match="is an experiment of its own"):
        stepsaver.compare(embedded, "mini_gsm8k", CONFIGS, limit=1, folder=tmp_path)
    assert path.read_text() == "question: mine\n"
