"""How the folder of a task is called among the results: after the task, and after the limit of a run that had one."""

import re
from pathlib import Path

LIMIT = "_limit_"


def task_folder(task: str, limit: int | None) -> str:
    return task if limit is None else f"{task}{LIMIT}{limit}"


def stored_limits(results: Path, task: str) -> list[int]:
    """The limits that a task was run with, the largest first."""
    names = (re.fullmatch(rf"{re.escape(task)}{LIMIT}(\d+)", path.name) for path in results.glob(f"{task}{LIMIT}*"))
    return sorted((int(name[1]) for name in names if name), reverse=True)
