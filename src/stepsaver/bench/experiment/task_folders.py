"""The names of task folders among the results: the task, and the limit if the run had one."""

import re
from pathlib import Path

LIMIT = "_limit_"


def task_folder(task: str, limit: int | None) -> str:
    return task if limit is None else f"{task}{LIMIT}{limit}"


def stored_limits(results: Path, task: str) -> list[int]:
    """Returns the limits that a task was run with, the largest first."""
    names = (re.fullmatch(rf"{re.escape(task)}{LIMIT}(\d+)", path.name) for path in results.glob(f"{task}{LIMIT}*"))
    return sorted((int(name[1]) for name in names if name), reverse=True)
