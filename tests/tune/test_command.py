"""`stepsaver tune` from the command line, on a tiny model: outcomes, resuming, and what it refuses."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepsaver.bench import durable
from stepsaver.bench.durable import exclusive
from stepsaver.cli import main
from stepsaver.engine import curve
from stepsaver.evaluation.recipe import read_recipe
from stepsaver.report.tuning_page import parallelism_line
from stepsaver.tune import confirm, tuning
from stepsaver.tune.observed import Goal, Observed
from stepsaver.tune.space import DeclaredSpace
from stepsaver.tune.trials import BenchTrials
from tests.evaluation.tiny_folder import write_model_folder

PROMPTS = 64


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    write_model_folder(folder / "model")
    lines = (json.dumps({"prompt": f"Count from {number}."}) for number in range(PROMPTS))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def tune(workspace: Path, *more: str) -> list[str]:
    given = ["--model", str(workspace / "model"), "--batch-size", "2", "--max-new-tokens", "16"]
    prompts = [] if "--task" in more else ["--prompts", str(workspace / "prompts.jsonl")]
    return ["tune", *given, *prompts, *more]


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "SECONDS", 0.0)


def test_a_tuning_says_what_it_came_to_and_goes_on_from_what_is_stored(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tune(workspace, "--max-drop", "99", "--budget", "15s", "--out", str(tmp_path / "tuned"), "--json")
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measure"] == "agreement"
    assert document["candidates"]
    searched = {each["problems"] for each in document["candidates"]}
    assert max(searched) <= PROMPTS // 2
    for attempt in document["attempts"]:
        assert attempt["problems"] <= PROMPTS // 2
    assert document["outcome"] in ("confirmed", "undecided", "rejected")
    page = (tmp_path / "tuned" / "tuning.html").read_text()
    assert "loss of agreement with plain decoding" in page
    assert bool(document["parallelism"]) == bool(document["recipe"])
    assert ("TPF with commits" in page) == bool(document["recipe"])
    if document["recipe"]:
        assert [each["name"] for each in document["parallelism"]] == ["baseline", document["attempts"][-1]["name"]]
        assert "with commits" in (tmp_path / "tuned" / "recipe.yaml").read_text().splitlines()[-1]
        recipe = read_recipe(tmp_path / "tuned" / "recipe.yaml")
        assert recipe.measured is not None
        assert recipe.measured.measure == "agreement"
        assert recipe.batch_size == 2
    before = json.loads((tmp_path / "tuned" / "attempts.json").read_text()) if document["attempts"] else None
    assert main(command) == 0
    again = json.loads(capsys.readouterr().out)
    if before:
        kept = json.loads((tmp_path / "tuned" / "attempts.json").read_text())["attempts"]
        assert kept[: len(before["attempts"])] == before["attempts"]
        assert [each["number"] for each in again["attempts"]] == list(range(1, len(again["attempts"]) + 1))
    other = tune(workspace, "--max-drop", "98", "--budget", "8s", "--out", str(tmp_path / "tuned"))
    if before:
        assert main(other) == 2
        assert "another max_drop" in capsys.readouterr().err
    # the folder is an experiment like any other
    assert main(["status", str(tmp_path / "tuned")]) == 0


def first_single(space: DeclaredSpace, trials: BenchTrials, goal: Goal) -> list[tuple[str, Observed]]:
    """A search that finds the first candidate, whatever was timed."""
    name = space.singles()[0]
    trials.run([name], 0)
    observed = trials.observed(name)
    assert observed is not None
    return [(name, observed)]


def won(attempt: confirm.Attempt, seen: Observed, limit: float) -> confirm.Attempt:
    """The first candidate wins, whatever was timed."""
    return judged(attempt, seen, limit).model_copy(update={"outcome": "confirmed"})


judged = confirm.judged


def test_a_winner_has_its_tokens_per_forward_beside_the_baselines(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "search", first_single)
    monkeypatch.setattr(confirm, "judged", won)
    out = tmp_path / "tuned"
    assert main(tune(workspace, "--max-drop", "90", "--budget", "10min", "--out", str(out))) == 0
    document = json.loads((out / "tuning.json").read_text())
    baseline, winner = document["parallelism"]
    assert (baseline["name"], winner["name"]) == ("baseline", document["attempts"][0]["name"])
    assert 0 < baseline["tokens_per_forward"] < baseline["tokens_per_step"]
    assert document["recipe"]["measured"]["over_autoregressive"]["value"] > 0
    line = parallelism_line(document)
    assert line in capsys.readouterr().out.splitlines()
    assert (out / "recipe.yaml").read_text().endswith(f"# {line}\n")
    assert read_recipe(out / "recipe.yaml").measured is not None
    assert line in (out / "tuning.html").read_text()
    # a search that does not try the winner any more still goes on from it
    recipe = (out / "recipe.yaml").read_text()
    singles = DeclaredSpace.singles
    monkeypatch.setattr(DeclaredSpace, "singles", lambda space: singles(space)[1:])
    assert main(tune(workspace, "--max-drop", "90", "--budget", "10min", "--out", str(out))) == 0
    assert (out / "recipe.yaml").read_text() == recipe
    assert json.loads((out / "tuning.json").read_text())["attempts"] == document["attempts"]
    # what was confirmed in one precision says nothing about another
    capsys.readouterr()
    assert main(tune(workspace, "--max-drop", "90", "--dtype", "float64", "--out", str(out))) == 2
    assert "is a tuning with another version of model, data or engine" in capsys.readouterr().err


def test_a_stopped_attempt_goes_on_with_the_problems_on_record(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another candidate comes first by now; a clock that goes backwards changes nothing."""
    monkeypatch.setattr(tuning, "search", first_single)
    out = tmp_path / "tuned"
    command = tune(workspace, "--max-drop", "90", "--budget", "10min", "--out", str(out))
    assert main(command) == 0
    path = out / "attempts.json"
    (attempt,) = json.loads(path.read_text())["attempts"]
    assert attempt["problems"] == 16
    path.write_text(path.read_text().replace(f'"{attempt["outcome"]}"', '"begun"'))
    singles, now = DeclaredSpace.singles, time.time()
    monkeypatch.setattr(DeclaredSpace, "singles", lambda space: singles(space)[1:])
    monkeypatch.setattr(confirm, "problems_needed", lambda *given: 32)
    monkeypatch.setattr(time, "time", lambda: now - 1e6)
    assert main(command) == 0
    first, *others = json.loads(path.read_text())["attempts"]
    assert first == attempt
    assert [(each["number"], each["problems"]) for each in others] == [(2, 32)][: len(others)]
    path.write_text(path.read_text().replace('"problems": 16', '"problems": 20').replace(attempt["outcome"], "begun"))
    capsys.readouterr()
    assert main(command) == 2
    assert "20 problems, which are no whole chunks" in capsys.readouterr().err


def test_a_second_tuning_at_once_is_refused_and_disturbs_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    command = tune(workspace, "--max-drop", "90", "--budget", "8s", "--out", str(out))
    with exclusive(out / "results"):
        assert main(command) == 2
        assert "another run is writing to" in capsys.readouterr().err
        assert [each.name for each in out.iterdir()] == ["results"]


def test_attempts_are_read_once_nobody_else_can_add_any(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read before the lock is held, those of a tuning that ends meanwhile would be lost."""
    out = tmp_path / "tuned"

    @contextmanager
    def after_another(folder: Path) -> Iterator[None]:
        with exclusive(folder):
            (out / "attempts.json").write_text('{"settings": null, "attempts": []}')
            yield

    out.mkdir()
    monkeypatch.setattr(durable, "exclusive", after_another)
    assert main(tune(workspace, "--max-drop", "90", "--budget", "8s", "--out", str(out))) == 2
    said = capsys.readouterr().err
    assert "attempts.json is damaged" in said
    assert [line for line in said.splitlines() if not line.startswith("note: measured")] == [said.splitlines()[-1]]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--max-drop", "0"), "not between 0 and 100"),
        (("--max-drop", "1", "--budget", "soon"), "no time such as"),
        (("--max-drop", "1", "--confidence", "1"), "not from 0.5 to below 1"),
        (("--max-drop", "1", "--answer", "("), "no regular expression"),
        (("--max-drop", "1", "--task", "mini_gsm8k", "--answer", "x"), "--answer is for --prompts"),
        (("--max-drop", "0.1"), "needs at least 3839 fresh problems, and there are 32"),
        (("--max-drop", "90", "--budget", "0.001s"), "too small for a verdict"),
    ],
)
def test_what_cannot_be_is_one_line(
    workspace: Path, tmp_path: Path, more: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tune(workspace, *more), "--out", str(tmp_path / "tuned")]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert [line for line in said.splitlines() if not line.startswith("note: measured")] == [said.splitlines()[-1]]
    assert not (tmp_path / "tuned").exists(), "nothing was decided: nothing stays"


def test_a_dry_run_says_what_would_be_tried_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tune(workspace, "--max-drop", "5", "--dry-run"), "--out", str(tmp_path / "tuned")]) == 0
    said = capsys.readouterr().out
    assert "single changes, and combinations of those that pay" in said
    assert "needs at least 74 fresh problems" in said
    assert "agreement with plain decoding" in said
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("more", [(), ("--task", "mini_mmlu")], ids=["written", "scored"])
def test_a_dry_run_lists_what_the_run_tries(
    more: tuple[str, ...],
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Scored texts allow fewer drafts than written ones."""
    command = tune(workspace, *more, "--max-drop", "90", "--budget", "10h", "--out", str(tmp_path / "tuned"))
    assert main([*command, "--dry-run"]) == 0
    listed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]

    def stopped(space: DeclaredSpace, trials: BenchTrials, goal: Goal) -> list[tuple[str, Observed]]:
        assert space.singles() == listed
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "search", stopped)
    assert main(command) == 130
    assert any("contextblock" in name for name in listed) == (not more)


def test_a_task_names_the_problems_that_its_winners_are_confirmed_on(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "--model", "embedded", "--task", "mini_gsm8k", "--batch-size", "32", "--max-drop", "1"]
    assert main([*command, "--dry-run", "--out", str(tmp_path / "tuned")]) == 0
    said = capsys.readouterr().out
    assert "search: 1319 problems of mini_gsm8k" in said
    assert "confirm: 5120 fresh problems of mini_gsm8k_large" in said
