"""Measuring what rows take, on tiny models. No test depends on how long anything took."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepsaver.bench import measure_rows
from stepsaver.bench.measure_rows import measure_row_costs
from stepsaver.bench.stored_costs import ROW_COSTS, read_row_costs, store_row_costs
from stepsaver.engine.models.load import random_model
from stepsaver.engine.packing import Step
from stepsaver.engine.row_costs import RowCosts
from tests.conftest import tiny_config

CURVES = ("forward", "attention", "mlp", "head")


@pytest.fixture(scope="module")
def costs() -> RowCosts:
    return measure_row_costs(random_model(tiny_config(), dtype=torch.float32))


def test_a_measured_profile_is_whole(costs: RowCosts) -> None:
    assert costs.rows == tuple(1 << power for power in range(11))
    for name in CURVES:
        curve = getattr(costs, name)
        assert len(curve) == len(costs.rows), name
        assert list(curve) == sorted(curve), name
        assert min(curve) >= 0, name
    assert min(costs.context_row, costs.cached_row, costs.tick, costs.sample, costs.step) >= 0
    assert costs.whole_forward(1) > 0
    assert costs.forward_rows >= 1
    assert (costs.dtype, costs.layers, costs.threads) == ("float32", 3, torch.get_num_threads())
    assert costs.weights == "32 bits"


LAYER = 1000.0
ATTENTION = LAYER * measure_rows._attention_share(tiny_config())  # a third of it for keys and values


def layer_seconds(step: Step) -> float:
    """A made-up clock: what the layers of a step take."""
    plan, seen = step.plan, step.start + len(step.tokens)
    attention = ATTENTION * (2 * plan.attention_run + plan.keys_values_run) / 3 + 2 * seen * plan.attention_run
    return attention + (LAYER - ATTENTION) * plan.mlp_run + (3 * seen * len(plan.layers) if plan.attention_run else 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["layer by layer", "in one call"])
def test_what_is_timed_is_what_was_meant(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that takes as long as its plans have rows, by part: the curves are these rows, whatever the clock."""

    def execute(batch, turns):  # type: ignore[no-untyped-def]
        executed, last = real(batch, turns), 0.0
        seconds = 7.0
        for step in (turn.step for turn in turns):
            seconds += 0.5 + step.plan.rows + 100 * step.plan.reads.bit_count() + layer_seconds(step)
            last = 5.0 if 0 < step.plan.reads.bit_count() < step.plan.rows else last
        plan = turns[0].step.plan
        if model.packed_layers is not None and plan.mlp_reused:
            seconds += (9 if plan.mlp_run else 4) * model.config.layers
        return executed._replace(seconds=seconds + last)

    real = measure_rows.execute
    monkeypatch.setattr(measure_rows, "execute", execute)
    monkeypatch.setattr(measure_rows.Scratch, "_layers_seconds", lambda _, steps: sum(map(layer_seconds, steps)))
    model = random_model(tiny_config(), dtype=dtype)
    costs = measure_row_costs(model, budget_seconds=1e9)
    rows = costs.rows
    samples = [max(count // 32, 1) for count in rows]
    assert costs.context_row == pytest.approx(2)
    assert costs.cached_row == pytest.approx(3)
    assert costs.step == pytest.approx(0.5)
    assert costs.attention == pytest.approx([ATTENTION * count for count in rows])
    assert costs.mlp == pytest.approx([(LAYER - ATTENTION) * count for count in rows])
    # a forward's curve has packing one sample in it already
    assert costs.last_layer == pytest.approx(0 if model.packed_layers is None else 5 - costs.step)
    assert costs.layer_apart == pytest.approx(
        0 if model.packed_layers is None else 9 - costs.step / model.config.layers
    )
    assert costs.layer_reused == pytest.approx(0 if model.packed_layers is None else 4)
    assert costs.head == pytest.approx([100 * count for count in rows])
    assert costs.forward == pytest.approx([7 + 0.5 * each + count for count, each in zip(rows, samples, strict=True)])


@pytest.mark.parametrize(
    "changes", [{"layers": 1}, {"max_positions": 16}, {"block_size": 1}, {"block_size": 16, "stop_ids": ()}]
)
def test_models_of_any_shape_can_be_measured(changes: dict[str, object]) -> None:
    model = random_model(tiny_config(**changes), dtype=torch.float64)
    costs = measure_row_costs(model, budget_seconds=0.0)
    assert costs.rows[-1] >= 32
    assert costs.dtype == "float64"
    assert costs.whole_forward(32) > 0


def test_disturbed_figures_are_evened_out() -> None:
    evened = measure_rows._ascending([1.0, 9.0, 2.0, -4.0, 12.0])
    assert list(evened) == sorted(evened)
    assert evened[-1] == 12.0
    assert min(evened) >= 0


def test_profiles_are_stored_by_session(costs: RowCosts, tmp_path: Path) -> None:
    other = replace(costs, threads=64)
    assert read_row_costs(tmp_path) == {}
    store_row_costs(tmp_path, "first", costs)
    store_row_costs(tmp_path, "second", other)
    assert read_row_costs(tmp_path) == {"first": costs, "second": other}


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"7", b'{"session": "one"}', b'{"session": "one", "rows": 7}', b"\xff", b"[" * 100_000],
    ids=lambda line: ascii(line)[:20],
)
def test_what_is_no_profile_is_left_out(line: bytes, costs: RowCosts, tmp_path: Path) -> None:
    store_row_costs(tmp_path, "whole", costs)
    path = tmp_path / ROW_COSTS
    path.write_bytes(line + b"\n" + path.read_bytes())
    assert read_row_costs(tmp_path) == {"whole": costs}


def test_a_profile_that_was_changed_is_left_out(costs: RowCosts, tmp_path: Path) -> None:
    store_row_costs(tmp_path, "one", costs)
    store_row_costs(tmp_path, "two", costs)
    path = tmp_path / ROW_COSTS
    path.write_text(path.read_text(encoding="utf-8").replace('"threads": 1', '"threads": 2', 1), encoding="utf-8")
    assert read_row_costs(tmp_path) == {"two": costs}
