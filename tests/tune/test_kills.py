"""A tuning that is killed during an attempt, again and again, on one folder."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.tiny_folder import write_model_folder

# A search that finds the first candidate, an attempt of all fresh problems, and a judge who never confirms.
DRIVER = """
import sys
from stepsaver.engine import curve
from stepsaver.cli import main
from stepsaver.tune import confirm, tuning
curve.SECONDS = 0.0
def search(space, trials, goal):
    names = space.singles()[:3]
    trials.run(names, 0)
    return [(name, trials.observed(name)) for name in names]
tuning.search = search
confirm.problems_needed = lambda seen, goal, confidence: goal.fresh_problems
confirm.judged = lambda attempt, seen, limit, judged=confirm.judged: (
    judged(attempt, seen, limit).model_copy(update={"outcome": "undecided"}))
sys.exit(main(sys.argv[1:]))
"""


def attempts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "attempts.json"
    return json.loads(path.read_text())["attempts"] if path.exists() else []


def killed_during_an_attempt(command: list[str], folder: Path, delay: float) -> bool:
    """Kills a tuning a little after an attempt was put on record; returns whether it was still running."""
    ended = sum(each["outcome"] != "begun" for each in attempts(folder))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if sum(each["outcome"] == "begun" for each in attempts(folder)) and len(attempts(folder)) > ended:
            time.sleep(delay)
            break
        time.sleep(0.01)
    is_running = process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return is_running


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_no_kill_gives_a_second_try_at_the_fresh_problems(kills: int, tmp_path: Path) -> None:
    """Whatever was on record before a kill is on record after it, and the attempt ends with just its problems."""
    write_model_folder(tmp_path / "model")
    prompts = (json.dumps({"prompt": f"Count from {number}."}) for number in range(200))
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    out, delays = tmp_path / "tuned", random.Random(kills)
    command = [sys.executable, "-c", DRIVER, "tune", "--model", str(tmp_path / "model"), "--batch-size", "2"]
    command += ["--max-new-tokens", "16", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-drop", "60"]
    command += ["--budget", "10min", "--out", str(out)]
    known: list[dict[str, Any]] = []
    killed = 0
    for _ in range(kills):
        killed += killed_during_an_attempt(command, out, delays.uniform(0.0, 0.3))
        found = attempts(out)
        assert [(each["name"], each["number"], each["problems"]) for each in found[: len(known)]] == [
            (each["name"], each["number"], each["problems"]) for each in known
        ]
        assert [each for each in known if each["outcome"] != "begun"] == found[: len(known)][
            : sum(each["outcome"] != "begun" for each in known)
        ]
        known = found
    assert killed >= min(kills, 10)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads((out / "tuning.json").read_text())
    assert [each["number"] for each in document["attempts"]] == [1, 2, 3]
    assert len({each["name"] for each in document["attempts"]}) == 3
    for each in document["attempts"]:
        assert (each["problems"], each["outcome"]) == (136, "undecided")
