"""Experiments with a second baseline: what is compared with what, for real on a tiny model and on made-up figures."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stepsaver.bench.audit import audit, read_evidence
from stepsaver.bench.experiment import Criterion, Experiment, Success
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.run import RunRequest, with_baselines
from stepsaver.bench.verdict import judge
from stepsaver.cli import main
from stepsaver.engine.errors import UsageError
from stepsaver.report.artifacts import read_stored_task
from stepsaver.report.experiment_page import experiment_page
from stepsaver.report.figures import wanted_regions
from stepsaver.report.overview import Overview, results_document
from tests.bench.conftest import EXPERIMENT
from tests.bench.running import run
from tests.bench.tampering import edit_lines
from tests.bench.test_statistics import SUCCESS, summary

PACED = """\
  - name: paced
    policy: "threshold:threshold=0.5,at_most=1"
    success:
      confirm_if: {speed_up: "> 1.8", drop_points: "< 1.5"}
      reject_if: {speed_up: "< 1", drop_points: "> 20"}
  - {name: paced_trim, baseline: paced, policy: "threshold:threshold=0.5,at_most=1", rules: ["trim:level=changed"]}
baseline: baseline
"""
TWO_BASELINES = EXPERIMENT.replace("baseline: baseline\n", PACED)
LIMIT = 4


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, write_experiment: Callable[[Path], Path]
) -> Path:
    """On a task that generates and on one that scores, where most rules find nothing to act on."""
    folder = write_experiment(tmp_path_factory.mktemp("baselines") / "experiment")
    text = TWO_BASELINES.replace("{model}", str(tiny_model)).replace("[mini_ifeval]", "[mini_ifeval, mini_mmlu]")
    (folder / "experiment.yaml").write_text(text)
    for task in ("mini_ifeval", "mini_mmlu"):
        run(folder, LIMIT, task=task)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(finished, tmp_path / "experiment"))


def summaries(folder: Path, task: str) -> dict[str, dict]:
    paths = (folder / "results" / f"{task}_limit_{LIMIT}").glob("*/summary.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def timings(folder: Path, config: str) -> list[dict]:
    path = folder / "results" / f"mini_ifeval_limit_{LIMIT}" / config / "trace.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["mini_ifeval", "mini_mmlu"])
def test_a_config_is_compared_with_its_own_baseline(finished: Path, task: str) -> None:
    found = summaries(finished, task)
    assert {name for name, each in found.items() if each["is_baseline"]} == {"baseline", "paced"}
    assert {name for name, each in found.items() if each["baseline"] == "paced"} == {"paced", "paced_trim"}
    for name, each in found.items():
        base = found[each["baseline"]]
        per_token = [one["cost"]["flops"] / (one["throughput"]["tokens"] or 1) for one in (base, each)]
        if each["predicted_by"] == "operations" and each["predicted"] is not None:
            assert each["predicted"] == pytest.approx(per_token[0] / per_token[1]), name
        drop = 100 * (base["accuracy"] - each["accuracy"])
        assert each["paired"]["drop_points"][0] == pytest.approx(drop)
    assert found["paced_trim"]["pairs"] == 2
    assert found["paced"]["paired"]["drop_points"][0] == 0


def test_the_audit_holds_configs_against_their_own_baseline(finished: Path) -> None:
    task = read_evidence(read_experiment(finished), finished / "results", f"mini_ifeval_limit_{LIMIT}")
    assert {(cell.name, other.name) for cell, other in task.others() if other.name == "paced"} == {
        ("paced_trim", "paced")
    }
    assert {other.name for _, other in task.others()} == {"baseline", "paced"}
    assert not [each for each in audit(task) if each.level == "invalid" and each.check != "rates"]


@pytest.mark.parametrize(
    ("stored", "is_invalid"),
    [
        ("threshold:threshold=0.9,at_most=none,strict=true", False),
        ("threshold:threshold=0.8", True),
        ("threshold:threshold=0.9,at_most=2", True),
        ("gone:rows=1", True),
    ],
)
def test_a_policy_is_compared_by_what_it_means(finished: Path, stored: str, is_invalid: bool) -> None:
    task = read_evidence(read_experiment(finished), finished / "results", f"mini_ifeval_limit_{LIMIT}")
    (cell,) = (each for each in task.cells if each.name == "trimmed")
    changed = replace(cell, identity=cell.identity.model_copy(update={"policy": stored}))
    task = replace(task, cells=tuple(changed if each is cell else each for each in task.cells))
    found = [each.message for each in audit(task) if each.check == "decoding"]
    assert found == (["trimmed did not run with the declared policy"] if is_invalid else [])


def test_only_the_baseline_of_what_is_run_again_is_timed_again(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(copied), "--limit", str(LIMIT), "--task", "mini_ifeval", "--force", "paced_trim"]
    before = {name: len(timings(copied, name)) for name in ("baseline", "paced")}
    assert main([*command, "--dry-run", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)
    assert {each["config"]: (each["chunks"], each["timed_again"]) for each in planned["cells"]} == {
        "paced": (0, 2),
        "paced_trim": (2, 0),
    }
    run(copied, LIMIT, "--force", "paced_trim")
    assert len(timings(copied, "paced")) == before["paced"] + 2
    assert len(timings(copied, "baseline")) == before["baseline"]


@pytest.mark.parametrize(
    ("disturbed", "again"), [("paced", {"paced": True, "paced_trim": True}), ("paced_trim", {"paced_trim": True})]
)
def test_a_disturbed_config_is_timed_again_beside_its_own_baseline(
    copied: Path, disturbed: str, again: dict[str, bool]
) -> None:
    """Whether a timing counts instead of the disturbed one, by config; the baseline beside it has one that does not."""
    configs = [each.name for each in read_experiment(copied).configs]
    for config in configs:
        rates = {0: 1000, 1: 10 if config == disturbed else 1000}
        path = copied / "results" / f"mini_ifeval_limit_{LIMIT}" / config / "trace.jsonl"
        edit_lines(
            path, lambda lines, of=rates: [each | {"seconds": each["tokens"] / of[each["chunk"]]} for each in lines]
        )
    before = {name: len(timings(copied, name)) for name in configs}
    run(copied, LIMIT, "--repeat-disturbed")
    found = {name: timings(copied, name)[before[name] :] for name in configs}
    assert {name: ["instead_of" in each for each in lines] for name, lines in found.items() if lines} == {
        name: [again.get(name, False)] for name in ("paced", "paced_trim")
    }
    assert len({each["session"] for lines in found.values() for each in lines}) == 1


def test_pages_and_tables_name_the_other_baseline(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(finished), "--check", "--wide", "--limit", str(LIMIT), "--task", "mini_ifeval"])
    printed = capsys.readouterr().out
    assert "Against baseline: " in printed
    assert "Against paced: " in printed
    assert any(line.startswith("paced_trim: against paced ") for line in printed.splitlines())
    experiment = read_experiment(finished)
    task = read_stored_task(
        experiment, finished / "results", "mini_ifeval", limit=LIMIT, model=experiment.spec.model, with_documents=False
    )
    assert task is not None
    page = experiment_page(experiment, [task])
    assert "points against baseline, and by a speed-up \\u003e 1.8 with a drop " in page
    assert "against paced" in page
    rates = {each.config: each.rate for each in task.summaries}
    assert [region.rate for region in wanted_regions(task)] == pytest.approx(
        [1.2 * rates["baseline"].value, 1.8 * rates["paced"].value]  # type: ignore[union-attr]
    )
    overview = results_document(Overview([task], [], []))
    assert "| paced (baseline) |" in overview
    assert "| paced_trim (fastest) |" in overview


def experiment_of(folder: Path, text: str) -> Experiment:
    (folder / "experiment.yaml").write_text(text.replace("{model}", "embedded"))
    return read_experiment(folder)


def test_each_config_comes_after_what_it_is_compared_with(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, TWO_BASELINES)
    assert experiment.baselines == ("baseline", "paced")
    options = RunRequest(tasks=(), configs=(experiment.config("paced_trim"), experiment.config("same")), model="")
    names = [each.name for each in with_baselines(experiment, options.configs, "mini_ifeval")]
    assert names == ["paced", "paced_trim", "baseline", "same"]
    assert str(experiment.success_of("paced_trim").confirm_if.speed_up) == "> 1.8"
    assert experiment.success_of("same") is experiment.spec.success


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("baseline: paced,", "baseline: pacd,"), "baseline 'pacd' is no config"),
        (("baseline: paced,", "baseline: paced_trim,"), "config paced_trim is a baseline and cannot be compared"),
        (("name: paced\n", "name: paced\n    baseline: same\n"), "baseline paced is itself compared with same"),
        (("name: baseline\n", "name: baseline\n    baseline: same\n"), "config baseline is a baseline and cannot be"),
        (('"> 1.8"', '"> 1.8 measured"'), "'> 1.8 measured' is no condition"),
    ],
)
def test_wrong_baselines_are_one_line_with_their_place(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=r"experiment\.yaml line \d+: ") as error:
        experiment_of(tmp_path, TWO_BASELINES.replace(*change))
    assert message in str(error.value)


def criteria(speed_up: str, drop: str) -> Success:
    unwanted = {"speed_up": "< 1.05", "drop_points": "> 20"}
    return Success(
        confirm_if=Criterion.model_validate({"speed_up": speed_up, "drop_points": drop}),
        reject_if=Criterion.model_validate(unwanted),
    )


@pytest.mark.parametrize(
    ("paced_up", "outcome"),
    [((1.9, 1.85, 1.95), "confirmed"), ((1.4, 1.35, 1.45), "rejected"), ((1.8, 1.7, 1.9), "undecided")],
)
def test_the_hypothesis_holds_if_it_does_against_every_baseline(paced_up: tuple, outcome: str) -> None:
    own = summary("near", (1.5, 1.4, 1.6), (1, 0, 2), baseline="baseline")
    paced = summary("paced_near", paced_up, (1, 0, 2), baseline="paced")
    wanted = {"near": SUCCESS, "paced_near": criteria("> 1.8", "< 5")}
    verdict = judge([own, paced], wanted.__getitem__)
    assert verdict.outcome == outcome
    assert verdict.sentence.startswith(f"{outcome.capitalize()}. Against baseline: Confirmed by near: 1.50x")
    assert "Against paced: " in verdict.sentence
