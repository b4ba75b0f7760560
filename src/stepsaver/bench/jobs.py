"""The jobs that were submitted for an experiment, and what the queue says about them."""

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepsaver.bench.run import Shard
from stepsaver.engine.errors import UsageError

JOBS = "jobs.jsonl"
# What a line of the record has to have.
FIELDS: dict[str, Any] = {"job": str, "shards": int, "results": str, "tasks": list, "limit": int | None}
QUEUE_SECONDS = 60
QUEUE_FORMAT = "%F|%T"  # the array's id and a job's state


class JobState(NamedTuple):
    job: str
    shards: int
    results: Path
    tasks: list[str]
    limit: int | None
    states: dict[str, int] | None  # how many shards are in which state of the queue; None: there is no queue to ask

    @property
    def is_live(self) -> bool:
        return bool(self.states)

    def __str__(self) -> str:
        if self.states is None:
            return f"job {self.job}: {self.shards} shards; no squeue here to ask about them"
        ended = self.shards - sum(self.states.values())
        parts = [f"{count} {state.lower()}" for state, count in sorted(self.states.items())]
        return f"job {self.job}: {self.shards} shards, {', '.join([*parts, f'{ended} not in the queue'])}"


def record_job(logs: Path, job: str, shards: Sequence[Shard]) -> None:
    first = shards[0]
    entry = {
        "job": job,
        "shards": len(shards),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "label": first.label,
        "results": str(first.results),
        "tasks": list(first.request.tasks),
        "limit": first.request.limit,
    }
    with (logs / JOBS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def job_states(logs: Path) -> list[JobState]:
    """Returns every job on record, the latest last, with its state in the queue."""
    path = logs / JOBS
    if not path.exists():
        return []
    entries = _entries(path)
    queue = _queue()
    return [
        JobState(
            each["job"],
            each["shards"],
            Path(each["results"]),
            each["tasks"],
            each.get("limit"),
            None if queue is None else dict(queue.get(each["job"], {})),
        )
        for each in entries
    ]


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in FIELDS.items()):
            raise UsageError(f"{path} line {number} is no record of a job")
    return entries


def _queue() -> dict[str, Counter[str]] | None:
    """Returns, by array, how many of this user's jobs are in which state; None if there is no queue."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", f"--format={QUEUE_FORMAT}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUEUE_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(f"squeue gave no answer within {QUEUE_SECONDS} s") from None
    if done.returncode:
        raise UsageError(f"squeue failed: {done.stderr.strip()}")
    found: dict[str, Counter[str]] = {}
    for line in done.stdout.split():
        job, _, state = line.partition("|")
        found.setdefault(job, Counter())[state] += 1
    return found


def refuse_beside_jobs(logs: Path, results: Path) -> None:
    """Raises if queued jobs write to these results: a second run would do what they are about to do."""
    live = next((each for each in job_states(logs) if each.is_live and each.results == results), None)
    if live:
        raise UsageError(f"{live}; wait for them, or stop them with `scancel {live.job}`")
