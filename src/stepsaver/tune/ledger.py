"""What a tuning has done so far, on disk: its settings and every attempt to confirm a candidate.

An attempt is on record before its first problem is run. A tuning that is stopped and run again therefore counts it, and
goes on with it first: no candidate gets a second try at the fresh problems.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepsaver.bench.durable import write_beside
from stepsaver.bench.statistics import Interval
from stepsaver.bench.store import read_json
from stepsaver.engine.errors import UsageError
from stepsaver.tune.confirm import Attempt

FILE = "attempts.json"


@dataclass(frozen=True)
class Entry:
    """An attempt that has begun; its result once there is one."""

    name: str
    number: int
    problems: int
    result: Attempt | None = None


class Ledger:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Opens the record of a tuning with these settings; one with other settings needs another folder."""
        self.path, self.settings = folder / FILE, dict(settings)
        self.entries: list[Entry] = []
        if not self.path.exists():
            return
        content = read_json(self.path) or {}
        try:
            stored, entries = content["settings"], [_entry(each) for each in content["attempts"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(f"{self.path} is damaged: set it aside, and its results with it") from None
        different = [name for name, value in self.settings.items() if stored.get(name) != value]
        if different:
            raise UsageError(
                f"{folder} is a tuning with another {', '.join(different)}; choose another folder with --out"
            )
        self.entries = entries

    @property
    def unfinished(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.result is None), None)

    @property
    def attempts(self) -> list[Attempt]:
        return [entry.result for entry in self.entries if entry.result]

    def begin(self, name: str, number: int, problems: int) -> int:
        """Puts an attempt on record, and returns its number of problems: as many as when it first began."""
        same = next((entry for entry in self.entries if entry.name == name), None)
        if same is not None:
            return same.problems
        self.entries.append(Entry(name, number, problems))
        self._write()
        return problems

    def end(self, attempt: Attempt) -> None:
        self.entries = [replace(each, result=attempt) if each.name == attempt.name else each for each in self.entries]
        self._write()

    def _write(self) -> None:
        content = {"settings": self.settings, "attempts": [asdict(entry) for entry in self.entries]}
        write_beside(self.path, json.dumps(content, indent=1) + "\n")


def _entry(content: Mapping[str, Any]) -> Entry:
    result = content["result"]
    if result is not None:
        intervals = {name: Interval(*result[name]) for name in ("speed_up", "drop")}
        result = Attempt(**{**result, **intervals})
    return Entry(str(content["name"]), int(content["number"]), int(content["problems"]), result)
