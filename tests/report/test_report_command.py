"""`stepsaver report` on a real run of a tiny model: pages, tables, figures, artifacts, and what is not whole."""

import csv
import json
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.folders import find_experiment
from stepsaver.cli import main
from stepsaver.commands.demo import WAYS_THAT_PAY
from stepsaver.report.artifacts import read_stored_task
from stepsaver.report.documents import read_documents
from tests.bench.tampering import edit_lines
from tests.evaluation.tiny_folder import write_model_folder
from tests.report.browsing import count, open_page, text, texts

EXPERIMENT = """\
question: Does it hold?
tasks: [mini_gsm8k, mini_mmlu]
configs:
  - name: baseline
  - {name: output, rules: ["layer_reuse:k=3,layers=0,mode=output"]}
  - {name: trimmed, rules: ["window:refresh=block", "trim:level=changed"]}
baseline: baseline
model: {model}
batch_size: 1
chunk_samples: 2
decoding: {sub_block_size: 4}
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""
LIMIT = 4
CONFIGS = ("baseline", "output", "trimmed")
TIMING_MAY_BE_ODD = (0, 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with all its results."""
    root = tmp_path_factory.mktemp("report")
    (root / "model").mkdir()
    write_model_folder(root / "model")
    folder = root / "experiments" / "00_tiny"
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(EXPERIMENT.replace("{model}", str(root / "model")))
    assert main(["run", str(folder), "--limit", str(LIMIT)]) in TIMING_MAY_BE_ODD
    return folder


@pytest.fixture
def experiment(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may spoil, in a folder of experiments of its own."""
    shutil.copytree(finished.parent, tmp_path / "experiments")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "experiments" / "00_tiny"


def report(experiment: Path, *options: str, expected: int = 0) -> None:
    assert main(["report", str(experiment), "--limit", str(LIMIT), *options]) == expected


def cell(experiment: Path, config: str, task: str = "mini_gsm8k") -> Path:
    return experiment / "results" / f"{task}_limit_{LIMIT}" / config


def page_data(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def block(tab: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in tab["blocks"] if each["name"] == name)


def test_a_report_writes_the_page_and_the_tables(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiment / "results.md").write_text("# Mine\n\n<!-- tables -->\n<!-- /tables -->\n\nmy analysis\n")
    report(experiment)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [str(experiment / "results.md"), str(experiment / "report.html")]
    assert printed[0] == "00_tiny, mini_gsm8k_limit_4, 4 samples"
    written = (experiment / "results.md").read_text()
    assert "| Config | Rules | Accuracy | Throughput (tokens/s) | Total Tokens | Total Time (h) | Notes |" in written
    assert re.search(r"#### \d{4}-\d\d-\d\d - 00_tiny\n- \*\*Task\*\*: mini_gsm8k", written)
    assert written.endswith("my analysis\n")
    tabs = page_data(experiment / "report.html")["tabs"]
    assert [tab["name"] for tab in tabs] == [f"mini_gsm8k_limit_{LIMIT}", f"mini_mmlu_limit_{LIMIT}"]
    assert [row[0]["text"] for row in block(tabs[0], "results")["rows"]] == list(CONFIGS)
    assert [each["name"] for each in block(tabs[0], "work")["figure"]["data"]][-2:] == ["sub-block steps", "commits"]


def test_scores_are_those_of_the_run(experiment: Path) -> None:
    found = find_experiment(str(experiment))
    for task in ("mini_gsm8k", "mini_mmlu"):
        stored = read_stored_task(found, experiment / "results", task, limit=LIMIT, model=found.spec.model)
        assert stored is not None
        for each in stored.done:
            assert each.summary is not None
            assert sum(each.scores.values()) / LIMIT == pytest.approx(each.summary.accuracy)


def test_questions_of_other_prompts_are_not_shown(experiment: Path) -> None:
    path = cell(experiment, "output") / "samples.jsonl"
    edit_lines(path, lambda lines: [line | {"digest": "another"} if "digest" in line else line for line in lines])
    found = find_experiment(str(experiment))
    documents = read_documents(found, "mini_gsm8k", limit=LIMIT, model=found.spec.model)
    stored = read_stored_task(found, experiment / "results", "mini_gsm8k", limit=LIMIT, model=found.spec.model)
    assert stored is not None
    by_name = {each.name: each for each in stored.cells}
    assert documents.fit(by_name["baseline"].records)
    assert not documents.fit(by_name["output"].records)


def test_tables_and_figures_for_a_paper(experiment: Path, tmp_path: Path) -> None:
    files = ["--csv", str(tmp_path / "t.csv"), "--latex", str(tmp_path / "t.tex")]
    report(experiment, *files, "--figures", str(tmp_path / "figures"))
    latex = (tmp_path / "t.tex").read_text()
    assert latex.count("\\begin{tabular}") == 2
    assert "\nbaseline & baseline & " in latex
    assert " \\% [" in latex
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert (rows[0]["verdict"], rows[0]["speed_up"], rows[0]["drop_points"]) == ("baseline", "1.0", "0.0")
    assert float(rows[1]["speed_up_low"]) <= float(rows[1]["speed_up"]) <= float(rows[1]["speed_up_high"])
    assert [(row["task"], row["config"]) for row in rows][:3] == [
        (f"mini_gsm8k_limit_{LIMIT}", each) for each in CONFIGS
    ]
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert f"mini_mmlu_limit_{LIMIT}_rate_over_time.pdf" in names
    assert f"mini_gsm8k_limit_{LIMIT}_accuracy_speed.png" in names
    assert {path.read_bytes()[:4] for path in (tmp_path / "figures").glob("*.pdf")} == {b"%PDF"}


def test_missing_running_stopped_and_failed_configs_are_named(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cell(experiment, "trimmed"))
    (cell(experiment, "output") / "summary.json").unlink()
    (cell(experiment, "trimmed", "mini_mmlu") / "run.json").write_text("{torn")
    (cell(experiment, "output", "mini_mmlu") / "summary.json").write_text("{torn")
    (experiment / "results" / ".lock").write_text("999999999")
    states = [("stopped, 4 of 4 samples", "incomplete"), ("running, 4 of 4 samples", "running")]
    for note, state in states:
        report(experiment)
        tabs = page_data(experiment / "report.html")["tabs"]
        last = {row[0]["text"]: row[1] for row in block(tabs[0], "results")["rows"]}
        assert last["baseline"]["text"] == "baseline"
        assert last["trimmed"] == {"text": "missing", "value": "missing", "small": "not run yet", "tone": "open"}
        assert last["output"]["text"] == state
        assert last["output"]["small"].startswith(note)
        failed = {row[0]["text"]: row[1]["text"] for row in block(tabs[1], "results")["rows"]}
        assert failed == {"baseline": "baseline", "output": "failed", "trimmed": "failed"}
        assert "Not there yet: output (" in (experiment / "results.md").read_text()
        (experiment / "results" / ".lock").write_text(f"{os.getpid()} on {platform.node()}")
    shutil.rmtree(cell(experiment, "baseline", "mini_mmlu").parent)
    report(experiment)
    assert "No config is finished yet on mini_mmlu." in page_data(experiment / "report.html")["lead"]
    shutil.rmtree(experiment / "results")
    report(experiment, expected=2)
    assert "has no results" in capsys.readouterr().err


def test_two_experiments_runs_and_models_side_by_side(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(experiment, experiment.parent / "01_other")
    shutil.copytree(experiment / "results", experiment.parent / "copy")
    (experiment.parent / "copy").rename(experiment / "results" / "some__model")
    old = cell(experiment, "trimmed")
    identity = json.loads((old / "run.json").read_text())["run_id"]
    shutil.copytree(old, old.parent / "previous" / f"trimmed-{identity}")
    expected = {"01_other": CONFIGS, "some/model": CONFIGS, identity: ("trimmed",), "previous": ("trimmed",)}
    for name, there in expected.items():
        report(experiment, "--task", "mini_gsm8k", "--compare", name)
        tab = page_data(experiment / "report.html")["tabs"][0]
        rows = block(tab, "compare")["rows"]
        assert {row[0]["text"] for row in rows if row[2]["text"] != "-"} == set(there), name
        marks = [each for each in block(tab, "accuracy_speed")["figure"]["data"] if each.get("meta")]
        assert len(marks) == len(CONFIGS) + len(there)
    report(experiment, "--compare", "nobody", expected=2)
    assert "nothing to compare with is called 'nobody'" in capsys.readouterr().err


def test_artifacts_show_a_run_without_its_results(experiment: Path, chromium: Any) -> None:
    report(experiment, "--save-artifacts")
    before = page_data(experiment / "report.html")["tabs"][1]
    saved = experiment / "artifacts" / f"mini_mmlu_limit_{LIMIT}"
    assert {path.stem for path in saved.glob("*.json")} == set(CONFIGS)
    assert all(path.read_text().count("\n") == 1 for path in saved.glob("*.json"))
    shutil.rmtree(experiment / "results")
    report(experiment)
    after = page_data(experiment / "report.html")["tabs"][1]
    assert block(after, "results") == block(before, "results")
    assert block(after, "work") == block(before, "work")
    open_page(chromium, experiment / "report.html")
    chromium.execute_async_script("window.shown.then(() => arguments[0]())")
    assert "Samples are not part of the artifacts" in text(chromium, "[data-block=samples]")
    assert chromium.get_log("browser") == []
    report(experiment, "--save-artifacts", expected=2)


def test_only_a_complete_run_becomes_artifacts(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell(experiment, "output") / "summary.json").unlink()
    report(experiment, "--save-artifacts", expected=2)
    assert "not complete: output (" in capsys.readouterr().err
    assert not (experiment / "artifacts").exists()


def test_damaged_artifacts_and_notes_are_one_line(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (experiment / "discarded.jsonl").write_text('{"task": 1\n[]\n{"task": "t", "config": "c", "when": 5, "why": "w"}\n')
    assert main(["report"]) == 0
    status = (experiment.parent / "STATUS.md").read_text()
    assert status.count("a line of discarded.jsonl cannot be read") == 2
    assert "00_tiny, t: c was set aside on 5: w" in status
    report(experiment, "--save-artifacts")
    (saved,) = (experiment / "artifacts").glob("mini_gsm8k*")
    (saved / "audit.jsonl").write_text('{"no": "finding"}\n')
    shutil.rmtree(experiment / "results")
    capsys.readouterr()
    report(experiment, expected=2)
    error = capsys.readouterr().err
    assert "audit.jsonl cannot be read" in error
    assert error.count("\n") == 1


def test_configs_that_never_ran_are_no_artifacts(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (experiment / "results").glob("*/output"):
        shutil.rmtree(folder)
    report(experiment, "--save-artifacts")
    saved = {path.stem for path in (experiment / "artifacts" / f"mini_mmlu_limit_{LIMIT}").glob("*.json")}
    assert saved == set(CONFIGS) - {"output"}
    shutil.rmtree(experiment / "results")
    report(experiment)
    assert "output (not among the artifacts)" in (experiment / "results.md").read_text()


def test_traced_samples_are_played_from_the_browser(experiment: Path, chromium: Any) -> None:
    report(experiment, "--trace-samples", "2", "--trace-config", "trimmed")
    open_page(chromium, experiment / "report.html")
    chromium.execute_async_script("window.shown.then(() => arguments[0]())")
    chromium.find_element("css selector", "[aria-label='next sample']").click()
    link = chromium.find_element("css selector", ".sample a")
    assert link.text == "Play this sample step by step: baseline and trimmed"
    question = text(chromium, ".question")
    link.click()
    assert chromium.title.startswith("stepsaver trace")
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return document.getElementById('sample').value") == "1"
    assert question in text(chromium, ".text")
    assert count(chromium, ".run") == 2


def test_the_page_over_all_experiments(experiment: Path, chromium: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(experiment, experiment.parent / "01_other")
    shutil.copytree(experiment, experiment.parent / "02_later", ignore=shutil.ignore_patterns("results"))
    entry = {"when": "20260120T000000Z", "task": f"mini_mmlu_limit_{LIMIT}", "config": "output", "why": "too <b>slow"}
    (experiment.parent / "01_other" / "discarded.jsonl").write_text(json.dumps(entry) + "\n")
    shutil.rmtree(experiment.parent / "01_other" / "results" / f"mini_mmlu_limit_{LIMIT}" / "output")
    capsys.readouterr()
    assert main(["report"]) == 0
    page = experiment.parent / "report.html"
    written = [page, experiment.parent / "RESULTS.md", experiment.parent / "STATUS.md"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == list(map(str, written))
    assert [line.split()[0] for line in printed[1:3]] == ["00_tiny", "01_other"]  # a line per experiment
    assert max(map(len, printed[:-3])) <= 80
    open_page(chromium, page)
    assert texts(chromium, "[data-block=index] td:first-child") == ["00_tiny", "01_other"]
    assert texts(chromium, "[data-block=metrics] td:first-child") == ["mini_gsm8k", "mini_mmlu"]
    assert count(chromium, "details[open]") == 0  # what is long waits to be asked for
    assert "output was set aside" in text(chromium, "[data-block=issues]")
    assert "too <b>slow" in text(chromium, "[data-block=issues]")
    pending = text(chromium, "[data-block=pending]")
    assert "02_later, mini_gsm8k: nothing is stored yet" in pending
    assert "output (not run yet)" in pending
    assert chromium.get_log("browser") == []
    assert main(["report", "--figures", "x"]) == 2


def test_a_demonstration_changes_nothing_but_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiments = Path(__file__).parents[2] / "experiments"
    leave = shutil.ignore_patterns("results", "logs", "report.html", "traces")
    for name in ("00_baseline", *(name for name, _ in WAYS_THAT_PAY)):
        shutil.copytree(experiments / name, tmp_path / "experiments" / name, ignore=leave)
    monkeypatch.chdir(tmp_path)

    def tracked() -> dict[Path, bytes]:
        paths = (path for path in tmp_path.rglob("*") if path.is_file() and "results" not in path.parts)
        return {path: path.read_bytes() for path in paths}

    before = tracked()
    for _ in range(2):
        assert main(["demo", "--limit", "1"]) == 0
        assert tracked() == before
    printed = capsys.readouterr().out.splitlines()
    folder = tmp_path / "experiments" / "00_baseline" / "results" / "mini_gsm8k_limit_1"
    assert printed[-2:] == [str(folder / "results.md"), str(folder / "report.html")]
    assert "Complete Results Table" in (folder / "results.md").read_text()
    shown = ("k1_first ", "k3_last ", "window_trim_near_light ", "verified_16 ")
    tables = [line.split()[0] for line in printed if line.startswith(shown)]
    assert tables == 2 * ["k1_first", "k3_last", "k1_first", "window_trim_near_light", "verified_16"]
    assert printed[-4].startswith("Use ")


def test_a_clone_reads_artifacts_where_it_has_no_results(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status and report, each of which says so; what is stored comes first."""

    def said(*command: str) -> tuple[int, str, Any]:
        capsys.readouterr()
        code = main([*command, str(experiment), "--limit", str(LIMIT)])
        printed = capsys.readouterr().out
        main([*command, str(experiment), "--limit", str(LIMIT), "--json"])
        return code, printed, json.loads(capsys.readouterr().out)

    report(experiment, "--save-artifacts")
    stored = {command: said(*command) for command in (("status",), ("report", "--check"))}
    assert all("artifacts" not in printed for _, printed, _ in stored.values())
    shutil.rmtree(experiment / "results")
    for command, (code, printed, document) in stored.items():
        clone_code, clone_printed, clone_document = said(*command)
        assert clone_code == code
        assert "from artifacts" in clone_printed
        assert json.loads(json.dumps(clone_document).replace('"artifacts"', '"results"')) == document
        if command[0] == "report":
            note = ", from artifacts: audited when they were saved"
            assert clone_printed.replace(note, "") == printed
    shutil.rmtree(experiment / "artifacts")
    report(experiment, "--check", expected=2)


def test_a_check_prints_and_writes_nothing(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 80 columns, unless everything is asked for; only what is invalid fails it."""
    before = {path for path in experiment.rglob("*") if path.suffix in (".html", ".md")}
    path = cell(experiment, "trimmed", "mini_mmlu") / "samples.jsonl"
    edit_lines(path, lambda lines: [lines[0] | {"digest": "another"}, *lines[1:]])
    capsys.readouterr()
    report(experiment, "--check", expected=1)
    printed = capsys.readouterr().out
    assert {path for path in experiment.rglob("*") if path.suffix in (".html", ".md")} == before
    assert not [line for line in printed.splitlines() if len(line) > 80]
    first = printed.splitlines()
    assert first[0] == "00_tiny, mini_gsm8k_limit_4, 4 samples"
    assert first[2].split()[:3] == ["config", "verdict", "right"]
    assert [line.split()[:2] for line in first[3:6]] == [
        ["baseline", "baseline"],
        *([n, "undecided"] for n in CONFIGS[1:]),
    ]
    assert re.search(r"audit, invalid: trimmed had another prompt than baseline", " ".join(printed.split()))
    report(experiment, "--check", "--wide", expected=1)
    assert "tokens/s" in capsys.readouterr().out
    report(experiment, "--json")
    found = json.loads(capsys.readouterr().out)[f"mini_mmlu_limit_{LIMIT}"]
    assert (found["outcome"], found["source"], found["unfinished"]) == ("undecided", "results", {})
    assert "invalid" in {finding["level"] for finding in found["findings"]}


def test_artifacts_do_not_hide_results_that_nothing_identifies(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(experiment, "--save-artifacts")
    for path in (experiment / "results").rglob("run.json"):
        path.write_text("{}")
    capsys.readouterr()
    report(experiment, "--check", "--json", expected=1)
    for task in json.loads(capsys.readouterr().out).values():
        assert task["source"] == "results"
        assert {(each["check"], each["level"]) for each in task["findings"]} == {("integrity", "invalid")}
    report(experiment)


def test_the_documents_over_all_experiments(experiment: Path) -> None:
    """The most urgent of what is pending first: a fault, then what is missing, then what is undecided or in part."""
    shutil.copytree(experiment, experiment.parent / "01_later", ignore=shutil.ignore_patterns("results"))
    path = cell(experiment, "trimmed", "mini_mmlu") / "samples.jsonl"
    edit_lines(path, lambda lines: [lines[0] | {"digest": "another"}, *lines[1:]])
    assert main(["report"]) == 0
    results, status = ((experiment.parent / name).read_text() for name in ("RESULTS.md", "STATUS.md"))
    headings = ["Performance Metrics Summary", "Accuracy vs Speed Tradeoffs", "Pending Experiments"]
    assert re.findall(r"^## (.*)$", results, re.MULTILINE) == headings
    assert "| Benchmark | Best accuracy | Best throughput (tokens/s) | Configuration | Notes |" in results
    assert re.search(r"\| baseline \(baseline\) \| 00_tiny \| mini_gsm8k_limit_4 \|", results)
    priorities = re.findall(r"- Priority: (\w+)", results)
    assert priorities == sorted(priorities, key=("critical", "high", "medium", "low").index)
    assert {"critical", "high", "low"} <= set(priorities)
    assert re.search(
        r"1\. 00_tiny, mini_mmlu_limit_4: the audit finds \d invalid; run it again\n   - Priority: crit", results
    )
    assert re.search(r"\| 00_tiny \| mini_gsm8k_limit_4 \| \S+ \| 3/3 \| \w+ \| \d{4}-\d\d-\d\d \| results \|", status)
    assert "- **invalid**: 00_tiny, mini_mmlu_limit_4: trimmed had another prompt than baseline" in status
    assert "01_later, mini_gsm8k: nothing is stored yet" in status


def test_a_new_experiment_has_the_whole_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Ada {name}")
    assert main(["new", "05_mine"]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "experiments" / "05_mine").glob("*.*")}
    assert written.keys() == {"experiment.yaml", "proposal.md", "tasks.md", "results.md"}
    assert re.search(r"\*\*Created\*\*: \d{4}-\d\d-\d\d\n\*\*Author\*\*: Ada \{name\}\n", written["proposal.md"])
    for words in ("### Setup", "### Experiment matrix", "### Metrics", "### Baseline", "### Success criteria"):
        assert words in written["proposal.md"]
    for words in ("**Status**", "**Date**", "## Summary", "## Conclusion", "## Next steps", "## Artifacts"):
        assert words in written["results.md"]
    assert [f"## Phase {phase}" in written["tasks.md"] for phase in range(4)] == [True] * 4
    assert "05_mine" in written["tasks.md"]
    assert find_experiment("05_mine").spec.question
