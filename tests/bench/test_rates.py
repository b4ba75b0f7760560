"""Rates by chunk: which chunks were disturbed, timing them again, and figures that agree with each other."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepsaver.bench import run as run_module
from stepsaver.bench.audit import CellEvidence, Finding, _contradicted, _pooled_time, timed_again_by
from stepsaver.bench.checksums import SUM
from stepsaver.bench.documents import Timing
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import find_experiment
from stepsaver.bench.session import ConfigRunner
from stepsaver.bench.timings import median_rate, slow_chunks
from stepsaver.cli import main
from stepsaver.report.cells import read_report_task
from stepsaver.report.documents import without_documents
from stepsaver.report.results_page import result_tables
from tests.bench import made_up
from tests.bench.conftest import PAIR, PAIR_LIMIT
from tests.bench.running import findings, lines, run
from tests.bench.tampering import edit_lines


def timing(chunk: int, rate: float, **changes: Any) -> Timing:
    return made_up.timing(chunk, tokens=100, seconds=100 / rate, **changes)


def disturbed(**rates: list[float]) -> set[tuple[str, int]]:
    timings = {name: [timing(chunk, rate) for chunk, rate in enumerate(each)] for name, each in rates.items()}
    return {(each.config, each.chunk) for each in slow_chunks(timings) if each.is_disturbed}


def test_a_chunk_is_disturbed_where_a_config_beside_it_was_not_slow() -> None:
    assert disturbed(a=[10, 10, 4], b=[20, 20, 20]) == {("a", 2)}
    assert disturbed(a=[10, 10, 5], b=[20, 20, 20]) == set(), "half of the median is not under it"
    assert disturbed(a=[10, 10, 4], b=[20, 20, 8]) == set(), "the chunk is slow for everybody"
    assert disturbed(a=[10, 10, 4], b=[20, 20, 8], c=[5, 5, 5]) == {("a", 2), ("b", 2)}
    assert disturbed(a=[10, 10, 4]) == set(), "nothing beside it to be told from"


def test_only_what_can_be_compared_is_slow_or_beside() -> None:
    mine = [timing(chunk, rate) for chunk, rate in enumerate([10, 10, 4])]
    beside = [timing(chunk, 20, comparable=False) for chunk in range(3)]
    assert not any(each.is_disturbed for each in slow_chunks({"a": mine, "b": beside}))
    other_session = [timing(chunk, 20, session="t") for chunk in range(3)]
    assert not any(each.is_disturbed for each in slow_chunks({"a": mine, "b": other_session}))
    assert median_rate(beside) is None
    found = median_rate(mine)
    assert found is not None
    assert (found.value, found.low, found.high) == (10, 4, 10)


@pytest.mark.parametrize(
    ("pooled", "rate", "is_fault"),
    [
        (193.0, [457.0, 440.0, 470.0], True),  # one stalled chunk dominates
        (1964.0, [2044.0, 1977.0, 2093.0], False),  # of four chunks, with nothing beside them
        (2946.0, [3031.0, 3011.0, 3063.0], False),  # a quiet machine whose first chunk was cold
        (2800.0, [3031.0, 3011.0, 3063.0], True),
        (2044.0, [2044.0, 2044.0, 2044.0], False),  # one chunk
    ],
)
def test_a_rate_over_the_whole_time_differs_by_no_more_than_the_interval(
    pooled: float, rate: list[float], is_fault: bool
) -> None:
    throughput = made_up.SUMMARY["throughput"] | {"tokens_per_s": pooled}
    summary = made_up.summary(rate=rate, throughput=throughput)
    found = list(_pooled_time("a", summary))
    assert [(each[0], each[2:]) for each in found] == [("disturbed", (("a",),))] * is_fault


@pytest.mark.parametrize(
    ("folder", "configs", "command"),
    [
        ("mini_gsm8k", ["trimmed"], "stepsaver run 00_tiny --task mini_gsm8k --force trimmed"),
        ("t_limit_256", ["b", "a"], "stepsaver run 00_tiny --task t --limit 256 --force a b"),
        ("t", ["trimmed", "baseline"], "stepsaver run 00_tiny --task t --force"),
        ("t", [], ""),
    ],
)
def test_one_command_times_again_what_was_disturbed(folder: str, configs: list[str], command: str) -> None:
    """All configs if their baseline was: it is timed beside each of them."""
    experiment = cast(Experiment, SimpleNamespace(name="00_tiny", baselines=("baseline",)))
    findings = [Finding("disturbed", "rates", "slow", (name,)) for name in configs]
    assert timed_again_by(experiment, folder, [*findings, Finding("invalid", "samples", "no", ("other",))]) == command


@pytest.mark.parametrize(
    ("sessions", "levels"),
    [
        ({"monday": 1000.0}, []),
        ({"monday": 1000.0} | {f"day {number}": 4000.0 for number in range(9)}, ["remark"]),  # it ran on monday only
        ({"monday": 4000.0}, ["invalid"]),
        ({"monday": 4000.0, "tuesday": 4000.0}, ["invalid"]),
    ],
)
def test_a_baseline_that_was_timed_on_other_days_too_contradicts_no_speed_up(
    sessions: dict[str, float], levels: list[str]
) -> None:
    def cell(name: str, rates: dict[str, float], up: float) -> CellEvidence:
        timings = [timing(chunk, rate, session=day) for day, rate in rates.items() for chunk in range(4)]
        summary = made_up.summary(
            rate=list(median_rate(timings) or ()),
            speed_up={each: [up, up - 0.1, up + 0.1] for each in ("tokens_per_s", "seconds_per_sample")},
        )
        return cast(CellEvidence, SimpleNamespace(name=name, summary=summary, counting=tuple(timings)))

    alone = {f"night {number}": 1200.0 for number in range(9)}  # the run was killed before the baseline's turn
    trimmed = cell("trimmed", {"monday": 1200.0} | (alone if "remark" in levels else {}), 1.2)
    found = list(_contradicted(trimmed, cell("baseline", sessions, 1.0)))
    assert [each[0] for each in found] == levels


@pytest.fixture
def experiment(finished_pair: Path, tmp_path: Path) -> Path:
    """A copy in which every chunk took its tokens / 1000 s."""
    shutil.copytree(finished_pair, tmp_path / "experiment")
    for config in PAIR:
        edit_lines(trace(tmp_path / "experiment", config), lambda lines: [at_rate(line, 1000.0) for line in lines])
    return tmp_path / "experiment"


def at_rate(line: dict, rate: float) -> dict:
    return line | {"seconds": line["tokens"] / rate}


def trace(folder: Path, config: str) -> Path:
    return folder / "results" / f"mini_ifeval_limit_{PAIR_LIMIT}" / config / "trace.jsonl"


def stored_timings(folder: Path, config: str) -> list[dict]:
    return [{name: value for name, value in each.items() if name != SUM} for each in lines(trace(folder, config))]


def summary(folder: Path, config: str) -> dict:
    return json.loads((trace(folder, config).parent / "summary.json").read_text())


def disturb(folder: Path, config: str, chunk: int) -> None:
    def slow(lines: list[dict]) -> list[dict]:
        return [at_rate(line, 10.0) if line["chunk"] == chunk else line for line in lines]

    edit_lines(trace(folder, config), slow)


def test_a_disturbed_chunk_is_named_and_timed_again(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disturb(experiment, "trimmed", 1)
    answers = (trace(experiment, "trimmed").parent / "samples.jsonl").read_bytes()
    said = [each.message for each in findings(experiment, PAIR_LIMIT)]
    assert any("trimmed was disturbed in 1 of 3 timings, of chunk 1" in each for each in said)
    run(experiment, PAIR_LIMIT)
    assert summary(experiment, "trimmed")["disturbed_chunks"] == [1]
    assert "over the whole time" in capsys.readouterr().out or summary(experiment, "trimmed")["rate"][1] < 100

    run(experiment, PAIR_LIMIT, "--repeat-disturbed")
    assert "trimmed: chunk 1 was timed again" in capsys.readouterr().out
    *before, again = stored_timings(experiment, "trimmed")
    assert [each["chunk"] for each in (*before, again)] == [0, 1, 2, 1], "both timings stay on record"
    assert again["instead_of"] == before[1]["session"] != again["session"]
    *_, beside = stored_timings(experiment, "baseline")
    assert (beside["chunk"], beside["session"], "instead_of" in beside) == (1, again["session"], False)
    found = summary(experiment, "trimmed")
    assert [each["seconds"] for each in found["timed_again"]] == [again["seconds"]]
    counted = [before[0], again, before[2]]
    assert found["throughput"]["decode_seconds"] == pytest.approx(sum(each["seconds"] for each in counted))
    assert found["pairs"] == 3, "the pair that was disturbed is not counted"
    assert found["rate"] == list(median_rate([Timing.model_validate(each) for each in counted]) or ())
    assert (trace(experiment, "trimmed").parent / "samples.jsonl").read_bytes() == answers


def test_a_machine_that_is_not_idle_is_said_and_stored(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "other_cores_now", lambda: 1.4)
    for config in PAIR:
        edit_lines(trace(experiment, config), lambda lines: [line | {"other_cores": 1.4} for line in lines])
    run(experiment, PAIR_LIMIT, "--repeat-disturbed")
    said = capsys.readouterr()
    assert "note: other processes keep 1.4 of" in said.err
    assert "trimmed was timed on a machine that was not idle: others kept 1.4 cores busy" in said.out
    assert summary(experiment, "trimmed")["other_cores"] == {"median": 1.4, "largest": 1.4}


def test_every_chunk_says_what_others_did_meanwhile(finished_pair: Path) -> None:
    for config in PAIR:
        assert all(
            each["other_cores"] is None or each["other_cores"] >= 0 for each in stored_timings(finished_pair, config)
        )


def test_a_disturbed_baseline_is_timed_again_with_all_that_was_beside_it(experiment: Path) -> None:
    disturb(experiment, "baseline", 2)
    run(experiment, PAIR_LIMIT, "--repeat-disturbed")
    for config in PAIR:
        *before, again = stored_timings(experiment, config)
        assert (again["chunk"], again["instead_of"]) == (2, before[2]["session"])
        assert len(summary(experiment, config)["timed_again"]) == 1
    assert summary(experiment, "trimmed")["pairs"] == 3


def test_nothing_is_timed_again_where_nothing_was_disturbed(experiment: Path) -> None:
    before = {config: stored_timings(experiment, config) for config in PAIR}
    run(experiment, PAIR_LIMIT, "--repeat-disturbed")
    assert {config: stored_timings(experiment, config) for config in PAIR} == before


def test_another_answer_when_timed_again_is_refused(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disturb(experiment, "trimmed", 1)
    run_chunk = ConfigRunner.run_chunk

    def with_other_answer(runner: ConfigRunner, *arguments: object, **keywords: object) -> tuple:
        records, timing = run_chunk(runner, *arguments, **keywords)  # type: ignore[arg-type]
        return [each.__class__(**{**each.__dict__, "ids": (5,)}) for each in records], timing

    monkeypatch.setattr(ConfigRunner, "run_chunk", with_other_answer)
    before = stored_timings(experiment, "trimmed")
    assert main(["run", str(experiment), "--limit", str(PAIR_LIMIT), "--repeat-disturbed"]) == 2
    assert "gave another answer to mini_ifeval document" in capsys.readouterr().err
    assert stored_timings(experiment, "trimmed") == before


def test_tables_show_the_rate_that_the_speed_up_is_made_of(experiment: Path) -> None:
    disturb(experiment, "trimmed", 1)
    run(experiment, PAIR_LIMIT)
    found = find_experiment(str(experiment))
    folder = f"mini_ifeval_limit_{PAIR_LIMIT}"
    task = read_report_task(found, experiment / "results", folder, without_documents("not needed"))
    text = result_tables([task])
    low, high = (f"{each:,.0f}" for each in summary(experiment, "trimmed")["rate"][1:])
    assert f"1,000 [{low}, {high}]" in text
    assert f"{summary(experiment, 'trimmed')['throughput']['tokens_per_s']:.2f}" not in text
