"""Runs experiments in this process and reads what they left."""

import json
from pathlib import Path

from stepsaver.bench.audit import Finding, audit, read_evidence
from stepsaver.bench.folders import find_experiment
from stepsaver.cli import main
from stepsaver.commands._experiment_options import chosen_of

TASK = "mini_ifeval"


def findings(folder: Path, limit: int, *, task: str = TASK, model: str | None = None) -> list[Finding]:
    chosen = chosen_of(find_experiment(str(folder)), [task], limit=limit, model=model)
    return audit(read_evidence(chosen.experiment, chosen.results, chosen.cell_folders[task]))


def invalid(folder: Path, limit: int, *, task: str = TASK, model: str | None = None) -> list[str]:
    """What the audit finds wrong but for rates: no timing decides a test."""
    found = findings(folder, limit, task=task, model=model)
    return [each.message for each in found if each.level == "invalid" and each.check != "rates"]


def run(folder: Path, limit: int, *flags: str, task: str = TASK, model: str | None = None) -> None:
    """Runs an experiment: its results are sound, and the exit code says what the audit says."""
    command = ["run", str(folder), "--task", task, "--limit", str(limit), *flags]
    code = main(command + (["--model", model] if model else []))
    found = findings(folder, limit, task=task, model=model)
    assert code == any(each.level == "invalid" for each in found)
    assert invalid(folder, limit, task=task, model=model) == []


def cell(folder: Path, config: str, limit: int, *, task: str = TASK) -> Path:
    return folder / "results" / f"{task}_limit_{limit}" / config


def summary(folder: Path, config: str, limit: int, *, task: str = TASK) -> dict:
    return json.loads((cell(folder, config, limit, task=task) / "summary.json").read_text())


def lines(path: Path) -> list[dict]:
    """The lines of a stored file after the first, which names the run."""
    return list(map(json.loads, path.read_text().splitlines()[1:]))


def answers(folder: Path, limit: int, *, task: str = TASK) -> dict[tuple[str, int, int], list[int]]:
    """What is stored of every sample of every config, whichever process wrote it; each of them once."""
    found = {}
    for path in sorted((folder / "results" / f"{task}_limit_{limit}").glob("*/samples*.jsonl")):
        for line in filter(lambda each: "ids" in each, lines(path)):
            key = (path.parent.name, line["chunk"], line["document"])
            assert key not in found, f"{key} is stored twice"
            found[key] = line["ids"]
    return found
