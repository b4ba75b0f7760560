"""Projections: exact where nothing has to be projected, bounded by what the data sheets say where it has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepsaver.bench.judging.foresight import CountedRun, CountedStep, foreseen_seconds
from stepsaver.bench.machine.device_profiles import FOLDER, device_names, device_profile
from stepsaver.bench.machine.shapes import SHAPES
from stepsaver.bench.running.step_counts import FIELDS, count_steps, merge_counts
from stepsaver.cli import main
from stepsaver.engine.row_costs import RowCosts, predicted_total
from stepsaver.engine.trace import ForwardRecord, LayersRun, SampleStep, Trace

LAYERS = 28
COSTS = RowCosts(
    device="made up",
    dtype="float32",
    weights="32 bits",
    threads=1,
    shape="any",
    layers=LAYERS,
    keys_values_share=0.5,
    rows=(1, 8, 64, 512),
    forward=(1e-3, 1.1e-3, 2e-3, 9e-3),
    attention=(1e-4, 1.2e-4, 4e-4, 3e-3),
    mlp=(2e-4, 2.5e-4, 9e-4, 7e-3),
    head=(1e-3, 1e-3, 2e-3, 9e-3),
    context_row=1e-8,
    tick=1e-4,
    sample=5e-5,
    step=1e-5,
    measuring=0.0,
)


def step(kind: str, rows: int, *, sample: int = 0, read: int = 4, order: int = 0) -> SampleStep:
    run = (LAYERS - 1) * rows + read
    return SampleStep(
        sample,
        kind,
        order,
        order,
        rows,
        order,
        64 + rows,
        run,
        0,
        LAYERS * rows,
        run,
        0,
        read,
        1,  # type: ignore[arg-type]
    )


def run_of(*steps: CountedStep, tokens: int = 100) -> CountedRun:
    return CountedRun(tokens, sum(each.number for each in steps), None, LAYERS, steps)


def test_equal_steps_one_at_a_time_cost_what_their_records_do() -> None:
    """Nothing is left to chance there: the projection is the prediction from the trace itself."""
    entry = step("full", 32)
    records = [ForwardRecord(0.0, 0.0, LayersRun(LAYERS, LAYERS, LAYERS), (entry,), 0)] * 7
    wanted = predicted_total(COSTS, records)
    run = run_of(CountedStep(7, entry), tokens=1)
    assert foreseen_seconds(run, COSTS, 1) == pytest.approx(wanted)


def test_a_fuller_forward_costs_less_per_token() -> None:
    run = run_of(
        CountedStep(90, step("full", 32)), CountedStep(60, step("sub", 8)), CountedStep(20, step("prefill", 64))
    )
    seconds = [foreseen_seconds(run, COSTS, batch) for batch in (1, 4, 16)]
    assert seconds == sorted(seconds, reverse=True)


def test_joined_steps_share_forwards() -> None:
    steps = (CountedStep(50, step("full", 32)), CountedStep(50, step("commit", 32)))
    apart, joined = CountedRun(9, 100, None, LAYERS, steps), CountedRun(9, 50, 50, LAYERS, steps)
    assert (apart.steps_per_sample, joined.steps_per_sample) == (1.0, 2.0)
    assert foreseen_seconds(joined, COSTS, 2.0) < foreseen_seconds(apart, COSTS, 1.0)


def test_counts_lose_nothing_but_when_a_step_was_taken() -> None:
    trace = Trace()
    for order in range(5):
        entries = (step("full", 32, order=order), step("sub", 8, sample=1, order=order))
        trace.add(ForwardRecord(0.0, 0.0, LayersRun(), entries, 0))
    merged = merge_counts([count_steps(trace), count_steps(trace)])
    assert len(merged) == 2
    rows = {fields[FIELDS.index("rows")]: (number, context) for number, context, *fields in merged}
    assert rows == {32: (10, 10 * 96), 8: (10, 10 * 72)}


@pytest.mark.parametrize("name", device_names())
def test_profiles_name_their_source_and_never_beat_their_data_sheet(name: str) -> None:
    profile, config = device_profile(name), SHAPES["7B"]
    assert "data sheet" in profile.source
    costs = profile.row_costs(config)
    weights = 2 * (config.layers * (2 * 3584 * 128 * 32 + 3 * 3584 * 18944) + 3584 * 152064)
    reading = weights / (1e9 * profile.read_gb_per_s)
    assert reading < costs.whole_forward(1) < 2 * reading
    multiplying = weights * 4096 / (1e12 * profile.tflops[profile.dtype])
    assert multiplying < costs.whole_forward(4096) < 3 * multiplying
    assert (FOLDER / f"{name}.yaml").read_text().count("\n") <= 6


def test_turing_means_float16() -> None:
    assert device_profile("rtx6000").dtype == "float16"
    assert device_profile("a100").dtype == "bfloat16"
    assert not replace(device_profile("rtx6000"), memory_gb=8).holds(SHAPES["7B"])


def test_the_command_marks_everything_as_projected(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["foresee", "04_combined", "--task", "mini_gsm8k", "--on", "rtx6000,h100", "--batch", "1,32"]
    assert main(arguments) == 0
    assert "PROJECTED" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["projected"] is True
    assert {(row["device"], row["batch"]) for row in document["tasks"]["mini_gsm8k"]} == {
        (device, batch) for device in ("rtx6000", "h100") for batch in (1, 32)
    }


@pytest.mark.parametrize(
    "wrong", [["--on", "v100"], ["--batch", "0"], ["--batch", "x"], ["--model-shape", "70B"], ["--limit", "3"]]
)
def test_wrong_use_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["foresee", "04_combined", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
