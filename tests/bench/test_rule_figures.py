"""The figures that `list rules` prints: read from stored summaries, chosen by what they cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.rule_figures import figures_of, stored_figures
from stepsaver.cli import main
from tests.bench.made_up import IDENTITY, SUMMARY, summary
from tests.test_architecture import ROOT


def save(folder: Path, config: str, up: float, drop: float, rules: list[str], **more: Any) -> None:
    params = {"rules": rules, "batch_size": more.pop("batch", 32), "policy": more.pop("policy", "threshold")}
    changes = {
        "config": config,
        "task": folder.name,
        "samples": more.pop("samples", 100),
        "is_baseline": not rules and params["policy"] == "threshold",
        "equal_to": more.pop("equal_to", None),
        "speed_up": {"tokens_per_s": [up, up - 0.1, up + 0.1], "seconds_per_sample": [up + 1, up + 1, up + 1]},
        "pairs": 20,
        "paired": SUMMARY["paired"] | {"drop_points": [drop, drop - 1, drop + 1]},
        "identity": IDENTITY | params,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{config}.json").write_text(json.dumps(summary(**changes | more).as_json()))


def test_the_fastest_that_can_be_afforded_on_the_largest_task(tmp_path: Path) -> None:
    small, large = (tmp_path / "00_mine" / "artifacts" / task for task in ("small", "large"))
    save(large, "baseline", 1.0, 0.0, [], samples=500)
    save(large, "slow", 1.1, 0.5, ["trim:level=drift"], samples=500)
    save(large, "fast", 1.3, 4.0, ["trim:level=changed"], samples=500)
    save(large, "garbage", 3.0, 40.0, ["trim:level=random"], samples=500)
    save(large, "both", 1.5, 1.0, ["trim:level=changed", "suffix_dropout:ahead=0"], samples=500)
    save(large, "other_policy", 2.0, 1.0, ["trim:level=changed"], samples=500, policy="fixed:rows=8")
    save(large, "same", 2.0, 0.0, ["trim:level=changed"], samples=500, is_control=True)
    save(large, "taken_over", 2.0, 0.0, ["trim:level=changed"], samples=500, equal_to="fast")
    save(small, "baseline", 1.0, 0.0, [])
    save(small, "lucky", 1.9, 0.0, ["trim:level=changed"])
    save(small, "alone", 1.2, 0.0, ["trim:level=changed"], batch=1)
    found = figures_of("trim", stored_figures(tmp_path))
    assert [(each.batch_size, each.config) for each in found] == [(1, "alone"), (32, "fast"), (32, "both")]
    assert found[1].speed_up.value == 1.3  # the smaller of the two
    assert str(found[1]).startswith("batch 32, alone: 1.30x [1.20, 1.40] at a drop of 4.0 [3.0, 5.0] points (00_mine, ")
    assert "with 1 other rule:" in str(found[2])
    assert [each.config for each in figures_of("suffix_dropout", stored_figures(tmp_path))] == ["both"]
    assert figures_of("tri", stored_figures(tmp_path)) == []


def test_a_rule_that_always_costs_too_much_shows_its_least(tmp_path: Path) -> None:
    folder = tmp_path / "00_mine" / "artifacts" / "task"
    save(folder, "baseline", 1.0, 0.0, [])
    save(folder, "worst", 3.0, 60.0, ["trim:level=changed"])
    save(folder, "bad", 2.0, 20.0, ["trim:level=drift"])
    assert [each.config for each in figures_of("trim", stored_figures(tmp_path))] == ["bad"]


def test_a_config_is_held_against_its_own_baselines_policy(tmp_path: Path) -> None:
    folder = tmp_path / "00_mine" / "artifacts" / "task"
    save(folder, "baseline", 1.0, 0.0, [])
    save(folder, "paced", 1.0, 0.0, [], policy="paced", is_baseline=True)
    save(folder, "paced_trim", 1.8, 0.0, ["trim:level=changed"], policy="paced", baseline="paced")
    assert [each.config for each in figures_of("trim", stored_figures(tmp_path))] == ["paced_trim"]


def test_the_command_reads_what_is_stored_and_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["list", "rules", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (alone, *_) = document["trim"]["measured"]
    path = ROOT / "experiments" / alone["experiment"] / "artifacts" / alone["task"] / f"{alone['config']}.json"
    stored = json.loads(path.read_text())
    assert alone["speed_up"] in stored["speed_up"].values()
    assert alone["drop_points"] == stored["paired"]["drop_points"]
    assert all(each["for"] for each in document.values())
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["list", "rules", "--wide"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("nothing is stored of it here") == len(document)
