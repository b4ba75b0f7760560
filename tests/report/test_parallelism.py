"""TPF and AUP, the field's own measures."""

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import ConfigSpec
from stepsaver.report.parallelism import (
    accuracy_under_parallelism,
    aup_lines,
    leaderboard,
    parallelism_of,
    parallelism_table,
    sweeps,
)
from tests.bench import made_up
from tests.report.reports import made_up_experiment, made_up_task


def summary(**changes: Any) -> Summary:
    kinds = made_up.kinds(prefill=10, full=20, sub=30, commit=10)
    cost = made_up.SUMMARY["cost"] | {"denoising_steps": 50, "flops": 2.4e9, "by_kind": kinds} | changes.pop("cost", {})
    return made_up.summary(cost=cost, **{"tokens_before_stop": 120} | changes)


def test_tokens_per_forward_with_and_without_commits() -> None:
    found = parallelism_of(summary())
    assert found is not None
    assert found.tokens_per_step == pytest.approx(120 / 50)
    assert found.tokens_per_forward == pytest.approx(120 / 60)


def test_what_took_no_step_has_none() -> None:
    cost = {"denoising_steps": 0, "flops": 1.0, "by_kind": {}}
    assert parallelism_of(summary(cost=cost)) is None


def test_a_scored_task_has_none_however_many_steps_it_took() -> None:
    assert parallelism_of(summary(tokens_before_stop=None)) is None
    assert parallelism_of(summary(tokens_before_stop=0)) is None


@pytest.mark.parametrize("path", ["generation", "scoring"])
def test_pages_have_the_table_for_generated_texts_only(tmp_path: Path, path: str) -> None:
    task = made_up_task(made_up_experiment(tmp_path))
    counted = 5000 if path == "generation" else None
    summaries = [each.model_copy(update={"tokens_before_stop": counted}) for each in task.summaries]
    cells = tuple(replace(each, summary=one) for each, one in zip(task.cells, summaries, strict=True))
    rows = parallelism_table(replace(task, cells=cells))["rows"]
    assert [row[0]["text"] for row in rows] == ([each.name for each in cells] if counted else [])
    assert all(row[4]["text"] == f"{1e9 / 5000 / 1e9:.4f}" for row in rows)


def test_a_sweep_is_of_configs_that_differ_in_their_threshold_alone(tmp_path: Path) -> None:
    """Two configs of one threshold that join differently are none; the leaderboard's file has both."""
    experiment = made_up_experiment(tmp_path)
    changes = ({"threshold": 0.9}, {"threshold": 0.8}, {"join": "on"}, {"policy": "threshold:at_most=2"})
    configs = [ConfigSpec.model_validate({"name": f"c{index}"} | each) for index, each in enumerate(changes)]
    task = made_up_task(replace(experiment, configs=tuple(configs)))
    assert sweeps(task) == {"no reuse": ["c0", "c1"], "no reuse, join=on": ["c2"], "no reuse, at_most=2": ["c3"]}
    assert aup_lines(task) == [], "as many tokens per forward at both thresholds"
    faster = task.cells[1].summary
    assert faster is not None
    faster = faster.model_copy(update={"cost": faster.cost.model_copy(update={"denoising_steps": 450})})
    swept = replace(task, cells=(task.cells[0], replace(task.cells[1], summary=faster), *task.cells[2:]))
    (line,) = aup_lines(swept)
    assert line.startswith("AUP of no reuse over 2 thresholds: ")
    stored = yaml.safe_load(leaderboard([task]))
    assert list(stored) == [task.folder]
    assert list(stored[task.folder]) == ["no reuse", "c2", "c3"]
    assert [len(each) for each in stored[task.folder].values()] == [2, 1, 1]
    tokens, right = stored[task.folder]["c2"][0]
    assert (tokens, right) == (pytest.approx(9500 / 92, abs=1e-4), 84.0)


def test_aup_of_one_point_is_its_area() -> None:
    assert accuracy_under_parallelism([(1.0, 80.0)], 80.0) == pytest.approx(80.0)


def test_aup_without_loss_is_the_area_under_the_curve() -> None:
    assert accuracy_under_parallelism([(3.0, 80.0), (1.0, 80.0)], 80.0) == pytest.approx(240.0)


def test_aup_weighs_lost_accuracy_down_and_leaves_out_what_lost_too_much() -> None:
    published = [(1.00, 82.82), (2.21, 81.48)]  # of Fast-dLLM v2 7B on GSM8K
    weight = exp(-3 * (1 - 81.48 / 82.82))
    expected = 82.82 + 1.21 * (82.82 + 81.48 * weight) / 2
    assert accuracy_under_parallelism(published, 82.82) == pytest.approx(expected)
    assert accuracy_under_parallelism([*published, (9.0, 77.0)], 82.82) == pytest.approx(expected)
    assert accuracy_under_parallelism(published, 90.0) < expected
