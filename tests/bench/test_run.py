"""Experiments run for real on a tiny model: complete, killed, repeated, and audited with planted faults."""

import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepsaver.bench import run as run_module
from stepsaver.bench import session as session_module
from stepsaver.bench.audit import Finding
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.run import CURVE
from stepsaver.bench.session import ConfigRunner, Session
from stepsaver.cli import main
from stepsaver.engine.curve import read_curve
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from tests.bench import running
from tests.bench.conftest import EXPERIMENT
from tests.bench.running import TASK, findings, run
from tests.bench.tampering import claim, edit_json, edit_lines

LIMIT = 10


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, write_experiment: Callable[[Path], Path]) -> Path:
    """An experiment folder with all its results."""
    folder = write_experiment(tmp_path_factory.mktemp("bench") / "experiment")
    run(folder, LIMIT)
    return folder


@pytest.fixture
def experiment(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(finished, tmp_path / "experiment")
    return tmp_path / "experiment"


def cell(folder: Path, config: str) -> Path:
    return running.cell(folder, config, LIMIT)


def found_in(folder: Path, level: str = "invalid") -> list[Finding]:
    return [each for each in findings(folder, LIMIT) if each.level == level]


def stored_answers(folder: Path, config: str) -> list:
    lines = map(json.loads, (cell(folder, config) / "samples.jsonl").read_text().splitlines())
    return [(line["chunk"], line["document"], line["ids"]) for line in lines if "ids" in line]


def test_a_run_stores_every_sample_once_and_a_summary(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config in ("baseline", "same", "output_0", "output_1", "trimmed"):
        assert [document for _, document, _ in stored_answers(finished, config)] == list(range(LIMIT))
    summary = json.loads((cell(finished, "trimmed") / "summary.json").read_text())
    source_keys = "task config timestamp accuracy throughput gpu_info git environment model_args eval_params"
    assert set(source_keys.split()) <= summary.keys()
    assert summary["samples"] == LIMIT
    assert summary["pairs"] == 5
    assert summary["batch_invariance"] == {"samples": 2, "different": 0}
    assert [summary["is_control"], running.summary(finished, "same", LIMIT)["is_control"]] == [False, True]
    more = "accuracy_interval paired speed_up cost peak_memory_bytes predicted run_id identity chunks"
    assert set(more.split()) <= summary.keys()
    assert {"policy", "rules", "decoding", "limit", "batch_size", "seed", "estimator"} <= summary["eval_params"].keys()
    assert {"tokens", "decode_seconds", "loading_seconds", "warm_up_seconds"} <= summary["throughput"].keys()
    assert {"full", "commit"} <= summary["cost"]["by_kind"].keys()
    assert summary["peak_memory_bytes"] > 0
    assert {"commit", "branch", "dirty"} == summary["git"].keys()
    assert summary["machine"].keys() == {"host", "job", "device", "memory_bytes", "driver"}
    assert summary["machine"]["host"] == platform.node()
    assert summary["machine"]["memory_bytes"] > 2**28
    assert summary["model_args"]["model"] == read_experiment(finished).spec.model
    assert summary["eval_params"]["num_fewshot"] == 0
    assert summary["environment"]["torch"] == torch.__version__
    assert summary["identity"]["data"]
    assert main(["status", str(finished), "--limit", str(LIMIT)]) == 0
    assert "5/5 configs" in capsys.readouterr().out


def test_a_run_knows_what_forwards_cost_on_its_machine(finished: Path) -> None:
    """Every chunk's prediction is made of it, and the baseline's of itself is one."""
    assert read_curve(cell(finished, "baseline").parent / CURVE).batch_size == 1
    for config in ("baseline", "trimmed"):
        timings = list(map(json.loads, (cell(finished, config) / "trace.jsonl").read_text().splitlines()))
        timings = [each for each in timings if "chunk" in each]
        assert all(each["predicted_seconds"] > 0 for each in timings)
    summaries = {config: running.summary(finished, config, LIMIT) for config in ("baseline", "trimmed")}
    assert {each["predicted_by"] for each in summaries.values()} == {"curve"}
    assert summaries["baseline"]["predicted"] == 1.0
    assert summaries["trimmed"]["predicted"] > 0


def test_nothing_is_measured_where_nothing_is_run(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "measure_curve", None)  # calling it fails
    stored = (cell(experiment, "baseline").parent / CURVE).read_bytes()
    run(experiment, LIMIT)
    assert main(["run", str(experiment), "--limit", "4", "--dry-run"]) == 0
    assert (cell(experiment, "baseline").parent / CURVE).read_bytes() == stored


def test_engines_take_what_a_forward_was_measured_to_cost(finished: Path) -> None:
    experiment = read_experiment(finished)
    session = session_module.open_session(experiment, model_name=experiment.spec.model)
    runner = ConfigRunner(session, experiment, experiment.config("baseline"), load_task(TASK, TaskOptions()))
    before = runner.engine
    _, timing = runner.run_chunk([], chunk=0, samples=0)
    assert (runner.engine, runner.engine.curve, timing.predicted_seconds) == (before, None, None)
    stored = read_curve(cell(finished, "baseline").parent / CURVE)
    assert session.measured_curve(stored) is stored  # it fits, so nothing is measured
    assert runner.engine.curve is stored
    session.curve = None
    assert session.measured_curve(replace(stored, threads=99)).threads == torch.get_num_threads()
    assert runner.engine is runner.engine


def test_what_is_complete_is_not_run_again(experiment: Path) -> None:
    before = {path: path.read_bytes() for path in experiment.rglob("*.jsonl")}
    summaries = {path: json.loads(path.read_text()) for path in experiment.rglob("summary.json")}
    run(experiment, LIMIT)
    assert {path: path.read_bytes() for path in experiment.rglob("*.jsonl")} == before
    for path, summary in summaries.items():
        again = json.loads(path.read_text())
        when = ("timestamp", "sum")
        assert {name: again[name] for name in again if name not in when} == {
            name: summary[name] for name in summary if name not in when
        }


def test_force_runs_the_named_configs_again_and_times_the_baseline_beside_them(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = stored_answers(experiment, "trimmed")
    run(experiment, LIMIT, "--force", "trimmed")
    assert stored_answers(experiment, "trimmed") == answers
    assert len((cell(experiment, "baseline") / "trace.jsonl").read_text().splitlines()) == 1 + 10
    (aside,) = (cell(experiment, "trimmed").parent / "previous").glob("trimmed-*")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ") and "aside" in line]
    assert said == [f"note: {cell(experiment, 'trimmed')} is run again: what was stored is set aside as {aside}"]
    assert json.loads((cell(experiment, "trimmed") / "summary.json").read_text())["pairs"] == 5


@pytest.mark.parametrize("is_unreadable", [False, True])
def test_what_cannot_be_run_sets_nothing_aside(
    experiment: Path, capsys: pytest.CaptureFixture[str], *, is_unreadable: bool
) -> None:
    """Neither results of other settings, if the model has no room for the new ones, nor if a file cannot be read."""
    before = sorted(path for path in experiment.rglob("*"))
    file = experiment / "experiment.yaml"
    if is_unreadable:
        (cell(experiment, "baseline").parent / CURVE).unlink()
        (cell(experiment, "baseline").parent / CURVE).mkdir()
        file.write_text(file.read_text().replace("seed: ", "# ") + "\nseed: 5\n")
    else:
        file.write_text(file.read_text() + "\nmax_new_tokens: 4096\n")
    assert main(["run", str(experiment), "--limit", str(LIMIT)]) == 2
    *noted, said = capsys.readouterr().err.splitlines()
    assert not [line for line in noted if "aside" in line]
    assert ("Is a directory" if is_unreadable else "leave no room for a prompt") in said
    assert sorted(path for path in experiment.rglob("*")) == before


def kill_and_resume(experiment: Path, kills: int, seed: int) -> None:
    """Kills a run at random moments, each time later, until it ends by itself."""
    command = [sys.executable, "-m", "stepsaver", "run", str(experiment), "--limit", str(LIMIT)]
    generator = random.Random(seed)
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        samples = experiment / "results"
        deadline = time.monotonic() + 120
        chunks = sum(path.read_bytes().count(b"chunk_end") for path in samples.rglob("samples.jsonl"))
        while process.poll() is None and time.monotonic() < deadline:
            now = sum(path.read_bytes().count(b"chunk_end") for path in samples.rglob("samples.jsonl"))
            if now > chunks:
                break
            time.sleep(0.01)
        time.sleep(generator.random() * 0.1)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == any(each.level == "invalid" for each in findings(experiment, LIMIT)), done.stderr


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_killed_run_goes_on_and_ends_with_the_same_samples(experiment: Path, finished: Path, kills: int) -> None:
    shutil.rmtree(experiment / "results")
    kill_and_resume(experiment, kills, seed=kills)
    for config in ("baseline", "same", "output_0", "output_1", "trimmed"):
        assert stored_answers(experiment, config) == stored_answers(finished, config)


def test_what_is_set_aside_with_a_reason_is_on_record(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(experiment, LIMIT, "--force", "--why", "cold start", "trimmed")
    entry = json.loads((experiment / "discarded.jsonl").read_text())
    assert (entry["task"], entry["config"], entry["why"]) == (f"mini_ifeval_limit_{LIMIT}", "trimmed", "cold start")
    assert (Path(entry["moved_to"]) / "samples.jsonl").exists()
    for wrong in (["--why", "no force"], ["--force", "--why", " "]):
        assert main(["run", str(experiment), "--limit", str(LIMIT), *wrong]) == 2
        assert "--why belongs to --force" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["results", "a cell", "a file", "a longer file"])
def test_results_that_are_removed_under_a_run_are_said_and_not_mixed(
    experiment: Path, finished: Path, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(experiment / "results")
    run_chunk, calls = ConfigRunner.run_chunk, []

    def spoil(runner: ConfigRunner, *arguments: object, **keywords: object) -> tuple:
        calls.append(runner.config.name)
        if len(calls) == 8:  # within the second chunk
            path = cell(experiment, "baseline") / "samples.jsonl"
            if what == "results":
                shutil.rmtree(experiment / "results")
            elif what == "a cell":
                shutil.rmtree(path.parent)
            elif what == "a file":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes() + b"{}\n")
        return run_chunk(runner, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ConfigRunner, "run_chunk", spoil)
        assert main(["run", str(experiment), "--limit", str(LIMIT)]) == 2
    assert "was removed or changed while this run wrote to it" in capsys.readouterr().err
    run(experiment, LIMIT)
    assert running.answers(experiment, LIMIT) == running.answers(finished, LIMIT)


def test_a_file_that_changes_while_it_is_run_is_said(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*_: object) -> None:
        file = experiment / "experiment.yaml"
        file.write_text(file.read_text().replace("k=3", "k=2"))

    monkeypatch.setattr(run_module, "not_idle", meanwhile)
    before = stored_answers(finished, "output_0")
    shutil.rmtree(cell(experiment, "output_0"))
    assert main(["run", str(experiment), "--limit", str(LIMIT)]) in (0, 1)  # the file declares other rules by then
    assert "note: experiment's file changed meanwhile" in capsys.readouterr().err
    assert stored_answers(experiment, "output_0") == before
    assert json.loads((cell(experiment, "output_0") / "run.json").read_text())["identity"]["rules"][0].startswith(
        "layer_reuse:k=3"
    )


def edit_samples(folder: Path, change, name: str = "samples.jsonl") -> None:
    edit_lines(folder / name, change)


def run_id_of(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["run_id"]


def plant_other_answer(folder: Path) -> None:
    edit_samples(cell(folder, "same"), lambda lines: [{**lines[0], "ids": [5]}, *lines[1:]])


def plant_output_difference(folder: Path) -> None:
    edit_samples(cell(folder, "output_1"), lambda lines: [{**lines[0], "ids": [5]}, *lines[1:]])


def plant_identical(folder: Path) -> None:
    for name in ("samples.jsonl", "trace.jsonl"):
        shutil.copy(cell(folder, "baseline") / name, cell(folder, "trimmed") / name)
        claim(cell(folder, "trimmed") / name, run_id_of(cell(folder, "trimmed")))


def plant_repeated_sample(folder: Path) -> None:
    def repeat(lines: list) -> list:
        lines[1] = {**lines[0]}
        return lines

    edit_samples(cell(folder, "trimmed"), repeat)


def plant_missing_chunk(folder: Path) -> None:
    edit_samples(cell(folder, "trimmed"), lambda lines: lines[:-3])


def plant_other_prompt(folder: Path) -> None:
    edit_samples(cell(folder, "trimmed"), lambda lines: [{**lines[0], "digest": "x"}, *lines[1:]])


def plant_other_code(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["identity"].update(source="other"))


def plant_other_threshold(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["identity"].update(policy="threshold:threshold=0.95"))


def plant_no_block_cache(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["identity"]["decoding"].update(block_cache=False))


def plant_padding(folder: Path) -> None:
    stop = json.loads((cell(folder, "trimmed") / "run.json").read_text())["identity"]["decoding"]["stop_ids"][0]
    edit_samples(cell(folder, "trimmed"), lambda lines: [{**lines[0], "ids": [5, stop, 7]}, *lines[1:]])


def plant_no_reuse(folder: Path) -> None:
    def inflate(lines: list) -> list:
        for line in lines:
            for figures in line["by_kind"].values():
                figures["row_layers"] *= 100
        return lines

    edit_samples(cell(folder, "trimmed"), inflate, "trace.jsonl")


def plant_slow_twin(folder: Path) -> None:
    def slow(lines: list) -> list:
        return [{**line, "seconds": 3 * line["seconds"]} for line in lines]

    edit_samples(cell(folder, "same"), slow, "trace.jsonl")


def plant_stalled_chunk(folder: Path) -> None:
    """Time over the whole run then gives another rate than the one that is shown, however wide its interval is."""
    edit_json(cell(folder, "trimmed") / "summary.json", lambda c: c["throughput"].update(tokens_per_s=1e9))


def plant_contradicting_speed_up(folder: Path) -> None:
    up = {"tokens_per_s": [50.0, 49.0, 51.0], "seconds_per_sample": [50.0, 49.0, 51.0]}
    edit_json(cell(folder, "trimmed") / "summary.json", lambda c: c.update(speed_up=up))


def plant_unequal_groups(folder: Path) -> None:
    path = folder / "experiment.yaml"
    path.write_text(path.read_text().replace("k=3,layers=1", "k=3,layers=9"))


def plant_batch_dependence(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "summary.json", lambda c: c["batch_invariance"].update(different=2))


PLANTED = [
    (plant_other_answer, "neutral"),
    (plant_output_difference, "identical"),
    (plant_identical, "identical"),
    (plant_repeated_sample, "samples"),
    (plant_missing_chunk, "samples"),
    (plant_other_prompt, "samples"),
    (plant_other_code, "provenance"),
    (plant_other_threshold, "decoding"),
    (plant_no_block_cache, "decoding"),
    (plant_padding, "tokens"),
    (plant_no_reuse, "reuse"),
    (plant_slow_twin, "rates"),
    (plant_stalled_chunk, "rates"),
    (plant_contradicting_speed_up, "rates"),
    (plant_batch_dependence, "batches"),
]


@pytest.mark.parametrize(("plant", "check"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_caught(experiment: Path, plant, check: str) -> None:
    plant(experiment)
    level = "disturbed" if plant in (plant_slow_twin, plant_stalled_chunk) else "invalid"  # a timing alone
    assert check in {finding.check for finding in found_in(experiment, level)}


def test_configs_that_join_other_forwards_need_not_be_as_fast(experiment: Path) -> None:
    """Joined forwards give the same answers by the same rules at another rate."""

    def told() -> list[str]:
        messages = [each.message for each in findings(experiment, LIMIT)]
        return [each for each in messages if each.startswith("baseline and same do the same work")]

    plant_slow_twin(experiment)
    assert told()
    edit_json(cell(experiment, "same") / "run.json", lambda c: c["identity"]["decoding"].update(join="on"))
    assert not told()


def plant_scores(folder: Path) -> None:
    scored = {"path": "scoring", "loglikelihood": -1.0}
    for config in ("baseline", "same", "output_0", "output_1", "trimmed"):
        edit_samples(cell(folder, config), lambda lines: [each | scored if "ids" in each else each for each in lines])


def test_rules_that_find_nothing_in_scored_answers_are_no_fault_if_others_do(experiment: Path) -> None:
    """As where an answer is a letter: some rules have nothing to act on, unless nobody's rules left anything out."""

    def of_the_pair() -> list[str]:
        found = [each for each in findings(experiment, LIMIT) if each.check in ("identical", "reuse")]
        return [each.level for each in found if "trimmed" in each.message and "baseline" in each.message]

    plant_identical(experiment)
    assert of_the_pair() == ["invalid"]
    plant_scores(experiment)
    claim(cell(experiment, "trimmed") / "samples.jsonl", run_id_of(cell(experiment, "trimmed")))
    assert of_the_pair() == ["remark"]
    for config in ("output_0", "output_1"):
        shutil.copy(cell(experiment, "baseline") / "trace.jsonl", cell(experiment, config) / "trace.jsonl")
        claim(cell(experiment, config) / "trace.jsonl", run_id_of(cell(experiment, config)))
    assert of_the_pair() == ["invalid"]


def plant_false_equality(folder: Path) -> None:
    found = {"requests": 1, "different": ["mini_ifeval document 0"], "row_layers": 1}
    edit_json(cell(folder, "same") / "summary.json", lambda c: c.update(equal_to="baseline", spot_check=found))


def plant_equality(folder: Path) -> None:
    found = {"requests": 1, "different": [], "row_layers": 1}
    edit_json(cell(folder, "same") / "summary.json", lambda c: c.update(equal_to="baseline", spot_check=found))


def plant_runaway(folder: Path) -> None:
    def lengthen(lines: list) -> list:
        return [{**line, "ids": [5] * 500} if "ids" in line else line for line in lines]

    edit_samples(cell(folder, "trimmed"), lengthen)


def plant_short_texts(folder: Path) -> None:
    edit_samples(
        cell(folder, "trimmed"), lambda lines: [{**line, "ids": [5]} if "ids" in line else line for line in lines]
    )


def plant_truncation(folder: Path) -> None:
    for config, finish in (("trimmed", "length"), ("baseline", "stop")):
        edit_samples(
            cell(folder, config),
            lambda lines, finish=finish: [{**line, "finish": finish} if "ids" in line else line for line in lines],
        )


def plant_cold_start(folder: Path) -> None:
    edit_samples(
        cell(folder, "trimmed"), lambda lines: [{**lines[0], "seconds": 1000.0}, *lines[1:]], name="trace.jsonl"
    )


def plant_wrong_prediction(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "summary.json", lambda c: c.update(predicted=50.0, predicted_by="operations"))


def plant_wrong_prediction_of_the_curve(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "summary.json", lambda c: c.update(predicted=40.0))


def plant_other_rules(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["identity"].update(rules=[]))


def plant_another_commit(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["provenance"]["git"].update(commit="0000"))


def plant_uncommitted_source(folder: Path) -> None:
    for path in folder.rglob("run.json"):
        edit_json(path, lambda c: c["provenance"]["git"].update(dirty=True))


def plant_concurrent_shards(folder: Path) -> None:
    edit_samples(
        cell(folder, "trimmed"), lambda lines: [{**line, "comparable": False} for line in lines], name="trace.jsonl"
    )


def plant_two_estimators(folder: Path) -> None:
    edit_json(cell(folder, "trimmed") / "run.json", lambda c: c["identity"].update(estimator="reference"))


@pytest.mark.parametrize(
    ("plant", "check", "says"),
    [
        (plant_false_equality, "equal", "not equal to baseline after all"),
        (plant_equality, "equal", "equals baseline"),
        (plant_runaway, "texts", "writes 500 tokens a sample"),
        (plant_short_texts, "texts", "writes 1 tokens a sample"),
        (plant_truncation, "texts", "hits the token limit in 100% of samples"),
        (plant_cold_start, "rates", "trimmed was disturbed in 1 of 5 timings, of chunk 0"),
        (plant_wrong_prediction, "prediction", "its operations predict 50.00x"),
        (plant_wrong_prediction_of_the_curve, "prediction", "the cost of its forwards predicts 40.00x"),
        (plant_other_rules, "decoding", "trimmed did not run with the declared rules"),
        (plant_another_commit, "provenance", "begun at 2 commits"),
        (plant_uncommitted_source, "provenance", "5 configs were begun while src/ had changes"),
        (plant_concurrent_shards, "shards", "timed by concurrent shards"),
        (plant_two_estimators, "decoding", "different estimators"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_odd_is_said(experiment: Path, plant, check: str, says: str) -> None:
    plant(experiment)
    found = findings(experiment, LIMIT)
    assert [each for each in found if each.check == check and says in each.message], found


def run_trimmed_again(experiment: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs one config again under a fault that the engine has by then; what the audit says."""
    capsys.readouterr()
    assert main(["run", str(experiment), "--limit", str(LIMIT), "--force", "trimmed"]) == 1
    return capsys.readouterr().out


def test_rules_that_never_reach_the_engine_are_caught(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_engine = Session.engine

    def without_rules(session: Session, experiment: Experiment, config: ConfigSpec) -> Engine:
        engine = whole_engine(session, experiment, config)
        engine.decoder = replace(engine.decoder, rules=())
        return engine

    monkeypatch.setattr(Session, "engine", without_rules)
    assert "trimmed claims reuse" in run_trimmed_again(experiment, capsys)


def test_a_threshold_that_never_reaches_the_engine_is_caught(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_engine = Session.engine

    def with_another_threshold(session: Session, experiment: Experiment, config: ConfigSpec) -> Engine:
        engine = whole_engine(session, experiment, config)
        engine.decoder = replace(engine.decoder, policy=Threshold(0.5))
        return engine

    monkeypatch.setattr(Session, "engine", with_another_threshold)
    assert "did not run with the declared policy" in run_trimmed_again(experiment, capsys)


def test_layers_that_do_not_exist_are_refused(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant_unequal_groups(experiment)
    assert main(["run", str(experiment), "--limit", str(LIMIT)]) == 2
    assert "not within 0-1" in capsys.readouterr().err


@pytest.mark.parametrize(("block", "architecture"), [(1, "Qwen2ForCausalLM"), (4, "Fast_dLLM_QwenForCausalLM")])
def test_another_model_with_smaller_blocks_runs(
    tmp_path: Path, tiny_model: Path, block: int, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The experiment's own model has blocks of 8. Sub-blocks follow the block where the file does not set them."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    edit_json(model / "config.json", lambda c: c.update(bd_size=block, architectures=[architecture]))
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = EXPERIMENT.replace("{model}", str(tiny_model)).replace("decoding: {sub_block_size: 4}\n", "")
    (folder / "experiment.yaml").write_text(text)
    run(folder, 2, model=str(model))
    (results,) = (folder / "results").rglob("mini_ifeval_limit_2")
    stored = json.loads((results / "trimmed" / "run.json").read_text())["identity"]["decoding"]
    assert (stored["block_size"], stored["sub_block_size"]) == (block, block)
    (folder / "experiment.yaml").write_text(text + "decoding: {sub_block_size: 8}\n")
    assert main(["run", str(folder), "--limit", "2", "--model", str(model)]) == 2
    assert f"sub-block size 8 does not divide the block size {block}" in capsys.readouterr().err


def everything_in(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_is_missing_and_writes_nothing(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_samples(cell(experiment, "trimmed"), lambda lines: lines[:-3])
    before = everything_in(experiment)

    def planned(*flags: str) -> dict[str, dict]:
        capsys.readouterr()
        assert main(["run", str(experiment), "--dry-run", "--json", *flags]) == 0
        return {each["config"]: each for each in json.loads(capsys.readouterr().out)[0]["cells"]}

    found = planned("--limit", str(LIMIT))
    assert {name: each["samples"] for name, each in found.items() if each["samples"]} == {"trimmed": 2, "baseline": 2}
    assert (found["trimmed"]["chunks"], found["baseline"]["chunks"], found["baseline"]["timed_again"]) == (1, 0, 1)
    assert "stored timings of trimmed (4 chunks)" in found["trimmed"]["basis"]
    assert found["trimmed"]["cost"]["flops"] > 0
    forced = planned("--limit", str(LIMIT), "--force", "same")
    assert (forced["same"]["chunks"], forced["same"]["remark"]) == (5, "what is stored is set aside")
    assert "stored timings of baseline" in planned("--limit", "6", "baseline")["baseline"]["basis"]
    assert "lengths of requests" in planned("--limit", "2", "--task", "mini_mmlu")["trimmed"]["basis"]
    assert main(["run", str(experiment), "--dry-run", "--limit", "6"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert everything_in(experiment) == before


def test_rules_that_cannot_act_are_named_before_the_run(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run, and by the run itself before its first chunk."""
    command = ["run", str(experiment), "--task", "mini_mmlu", "--limit", "2", "--estimator", "reference"]
    why = "rules of same, output_0, output_1, trimmed cannot act: the reference estimator is one forward per request"
    taken_over = "same, output_0, output_1, trimmed take over the answers of baseline"
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert why in planned
    assert taken_over in planned

    def stop(*_: object, **__: object) -> None:
        raise UsageError("stopped before the first chunk")

    monkeypatch.setattr(run_module, "run_missing", stop)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"note: mini_mmlu_limit_2: {why}" in said
    assert taken_over in said


def test_the_estimator_of_the_command_line_is_part_of_the_run(experiment: Path) -> None:
    def run_and_read(*flags: str) -> dict:
        run(experiment, 2, "baseline", *flags, task="mini_mmlu")
        return running.summary(experiment, "baseline", 2, task="mini_mmlu")

    one, other = run_and_read(), run_and_read("--estimator", "reference")
    assert [each["eval_params"]["estimator"] for each in (one, other)] == ["trajectory", "reference"]
    assert one["run_id"] != other["run_id"]
    assert run_and_read("--estimator", "reference")["run_id"] == other["run_id"]


def test_a_damaged_file_is_named_and_its_samples_are_run_again(
    experiment: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cell(experiment, "same") / "samples.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"document": 4', b'"docum\x00', 1))
    run(experiment, LIMIT)
    aside = next(path.parent.glob("samples.jsonl.damaged-*"))
    assert str(aside) in capsys.readouterr().err
    assert sorted(stored_answers(experiment, "same")) == stored_answers(finished, "same")


@pytest.mark.parametrize("fills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    experiment: Path, finished: Path, fills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may not grow any more, each time a little later; with room the run goes on, and its audit holds."""
    shutil.rmtree(experiment / "results")
    largest = (cell(finished, "baseline") / "trace.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(fills):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest * (number + 1) // (fills + 1), limits[1]))
        try:
            code = main(["run", str(experiment), "--limit", str(LIMIT)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == 2
        assert "what was stored before is whole" in capsys.readouterr().err
    assert stored_answers(experiment, "baseline")
    run(experiment, LIMIT)
    assert running.answers(experiment, LIMIT) == running.answers(finished, LIMIT)


@pytest.mark.long
def test_a_real_disk_that_fills_up(experiment: Path, finished: Path, tmp_path: Path) -> None:
    """A file system that grows by two pages at a time, from one on which hardly anything fits."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        moved = shutil.copytree(experiment, disk / "experiment", ignore=shutil.ignore_patterns("results"))
        command, stopped = ["run", str(moved), "--limit", str(LIMIT)], 0
        for size in range(40, 1000, 8):
            subprocess.run(["mount", "-o", f"remount,size={size}k", str(disk)], check=True)
            code = main(command)
            stopped += code == 2
            if code != 2:
                break
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        run(moved, LIMIT)
        assert stopped >= 8
        assert running.answers(moved, LIMIT) == running.answers(finished, LIMIT)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
