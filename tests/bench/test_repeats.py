"""Everything timed again in fresh processes, and autoregressive decoding beside every config."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.session import divided
from stepsaver.cli import main
from tests.bench.running import answers, cell, lines, run, summary
from tests.bench.tampering import edit_lines

LIMIT, CHUNKS, REPEATS = 6, 3, 3
CONFIGS = ("baseline", "trimmed", "autoregressive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_experiment: Callable[[Path], Path]) -> Path:
    folder = write_experiment(tmp_path_factory.mktemp("repeats") / "experiment")
    path = folder / "experiment.yaml"
    kept = [line for line in path.read_text().splitlines(keepends=True) if "layer_reuse" not in line]
    reference = "  - {name: autoregressive, decode: autoregressive}"
    path.write_text("".join(kept).replace("\nbaseline:", f"\n{reference}\nbaseline:"))
    return folder


def timings(folder: Path, config: str) -> list[tuple[int, int, str]]:
    found = lines(cell(folder, config, LIMIT) / "trace.jsonl")
    return sorted((each["repeat"], each["chunk"], each["session"]) for each in found)


@pytest.fixture(scope="module")
def repeated(folder: Path) -> Path:
    run(folder, LIMIT)
    assert (summary(folder, "trimmed", LIMIT)["pairs"], summary(folder, "trimmed", LIMIT)["sessions"]) == (CHUNKS, 1)
    before = answers(folder, LIMIT)
    run(folder, LIMIT, "--repeats", str(REPEATS))
    assert answers(folder, LIMIT) == before, "a repeat is for timings alone"
    return folder


def test_every_repeat_times_every_config_once_in_a_process_of_its_own(repeated: Path) -> None:
    for config in CONFIGS:
        found = timings(repeated, config)
        assert [each[:2] for each in found] == [(k, chunk) for k in range(REPEATS) for chunk in range(CHUNKS)]
        assert len({session for repeat, _, session in found}) == REPEATS
    one = summary(repeated, "trimmed", LIMIT)
    assert (one["pairs"], one["sessions"], one["chunks"]) == (CHUNKS * REPEATS, REPEATS, CHUNKS)


def test_a_dry_run_counts_what_is_left_to_be_timed(repeated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, samples in (((), 0), (("--repeats", "3"), 0), (("--repeats", "5"), 2 * LIMIT)):
        capsys.readouterr()
        command = ["run", str(repeated), "--limit", str(LIMIT), "--task", "mini_ifeval", "--dry-run", "--json"]
        assert main([*command, *flags]) == 0
        (task,) = json.loads(capsys.readouterr().out)
        assert {each["config"]: each["samples"] for each in task["cells"]} == dict.fromkeys(CONFIGS, samples)


def test_what_is_assumed_makes_the_hours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(folder), "--limit", "50", "--task", "mini_gsm8k", "--dry-run", "--json"]
    assert main([*command, "--assume-tokens", "20", "--assume-rate", "10"]) == 0
    (task,) = json.loads(capsys.readouterr().out)
    assert [each["cost"]["seconds"] for each in task["cells"]] == [50 * 20 / 10] * len(CONFIGS)
    assert "20 tokens for each generated answer at 10 tokens/s, which is assumed" in task["cells"][0]["basis"]
    assert main([*command, "--assume-tokens", "0"]) == 2


def test_a_task_that_cannot_be_loaded_does_not_end_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(folder), "--limit", "2", "--task", "humaneval", "--dry-run", "--json"]
    assert main([*command, "--task", "mini_ifeval"]) == 0
    said = capsys.readouterr()
    assert [each["task"] for each in json.loads(said.out)] == ["mini_ifeval_limit_2"]
    assert "note: humaneval is left out: " in said.err
    assert main([*command, "--task", "gpqa_main_n_shot", "--data-dir", str(tmp_path)]) == 2


@pytest.mark.long
def test_a_repeat_goes_on_from_what_is_timed(repeated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {config: timings(repeated, config) for config in CONFIGS}
    run(repeated, LIMIT, "--repeats", str(REPEATS))
    assert {config: timings(repeated, config) for config in CONFIGS} == before
    path = cell(repeated, "trimmed", LIMIT) / "trace.jsonl"
    edit_lines(path, lambda stored: [each for each in stored if (each["repeat"], each["chunk"]) != (1, 2)])
    run(repeated, LIMIT, "--repeats", str(REPEATS))
    for config in CONFIGS:  # what it is compared with is timed beside it
        new = [each[:2] for each in timings(repeated, config) if each not in before[config]]
        assert new == [(1, 2)]
    assert main(["run", str(repeated), "--limit", str(LIMIT), "--repeats", "2", "--shards", "2"]) == 2
    assert "shards that share a machine give none" in capsys.readouterr().err


def test_the_reference_is_timed_beside_every_config_and_not_judged(
    repeated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = read_experiment(repeated)
    assert (experiment.reference, experiment.baselines) == ("autoregressive", ("baseline",))
    assert experiment.timed_beside("trimmed") == ("baseline", "autoregressive")
    ours, theirs = summary(repeated, "trimmed", LIMIT), summary(repeated, "autoregressive", LIMIT)
    assert (ours["is_reference"], theirs["is_reference"]) == (False, True)
    assert theirs["over_reference"]["tokens_per_s"] == [1.0, 1.0, 1.0]
    product = theirs["speed_up"]["tokens_per_s"][0] * ours["over_reference"]["tokens_per_s"][0]
    assert product == pytest.approx(ours["speed_up"]["tokens_per_s"][0], rel=0.5)
    command = ["report", str(repeated), "--limit", str(LIMIT), "--task", "mini_ifeval"]
    assert main([*command, "--against", "trimmed", "--html", str(repeated / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "autoregressi  reference" in printed or "autoregressive  reference" in printed
    assert f"_limit_{LIMIT}, against trimmed" in printed
    assert "speed-up over trimmed" in printed
    assert "autoregressive" not in experiment.success_of("trimmed").model_dump_json()


def test_a_scored_task_scores_the_reference_by_its_own_likelihood(repeated: Path) -> None:
    run(repeated, 4, task="mini_mmlu")
    names = {config: summary(repeated, config, 4, task="mini_mmlu") for config in CONFIGS}
    assert {name: each["identity"]["estimator"] for name, each in names.items()} == dict.fromkeys(CONFIGS, "trajectory")
    assert names["autoregressive"]["equal_to"] is None, "its row is not another config's"


@pytest.mark.parametrize(
    ("count", "size", "groups"), [(10, 4, [4, 6]), (8, 4, [4, 4]), (3, 4, [3]), (11, 4, [4, 7]), (1, 1, [1])]
)
def test_no_chunk_is_smaller_than_was_asked_for(count: int, size: int, groups: list[int]) -> None:
    assert [len(each) for each in divided(range(count), size)] == groups
    assert [item for group in divided(range(count), size) for item in group] == list(range(count))


def test_a_chunk_holds_two_batches_and_settings_may_stand_by_task(repeated: Path) -> None:
    spec = read_experiment(repeated).spec
    assert [spec.chunk_of(batch) for batch in (1, 2, 32)] == [2, 4, 64]
    by_task = spec.model_copy(update={"estimator": {"mini_mmlu": "reference"}})
    assert [by_task.estimator_of(task) for task in ("mini_mmlu", "mini_ifeval")] == ["reference", "trajectory"]
    experiment = read_experiment(repeated)
    assert experiment.estimator_of(experiment.config("autoregressive"), "mini_mmlu") == "trajectory"
