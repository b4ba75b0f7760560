"""A table that was measured on a machine, stored so that documents can quote it."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stepsaver.bench.durable import write_beside
from stepsaver.engine.machine import device_name


@dataclass(frozen=True)
class Measurement:
    command: str  # measures it again
    machine: str
    date: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def store_measurement(path: Path, command: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes the table with the machine and the day."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    found = Measurement(command, machine_text(), date, tuple(columns), tuple(map(tuple, rows)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, json.dumps(asdict(found), indent=1) + "\n")


def read_measurement(path: Path) -> Measurement | None:
    """Returns None if there is no such file, or if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        columns, rows = tuple(map(str, content["columns"])), tuple(tuple(map(str, row)) for row in content["rows"])
        command, machine, date = (str(content[name]) for name in ("command", "machine", "date"))
        return Measurement(command, machine, date, columns, rows)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def machine_text() -> str:
    """Returns the processor and the number of threads that torch uses."""
    return f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads"
