"""JSONL that a user wrote: one object per line, and the line number in every complaint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise UsageError(f"{path} line {number} is not an object")
        yield number, entry


def id_list(entry: dict[str, Any], field: str, where: str) -> tuple[int, ...]:
    """Returns a list of token ids in an entry."""
    ids = entry.get(field)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise UsageError(f'{where}: expected {{"{field}": [whole numbers]}}')
    return tuple(ids)


def text_of(entry: dict[str, Any], field: str, where: str) -> str:
    from stepsaver.evaluation.encoding import checked_text  # it imports torch, and `--help` does not need it

    text = entry.get(field)
    if not isinstance(text, str):
        raise UsageError(f'{where}: expected {{"{field}": "text"}}')
    return checked_text(text, where)
