"""Altering stored results: as somebody does who knows nothing of checksums, or who computes them again."""

import json
from collections.abc import Callable
from pathlib import Path

from stepsaver.bench.checksums import SUM, first_line, seal, seal_document

Lines = list[dict]


def edit_lines(path: Path, change: Callable[[Lines], Lines]) -> None:
    """Changes what a file says and computes all checksums again, so that only its content is wrong."""
    lines = [{k: v for k, v in json.loads(line).items() if k != SUM} for line in path.read_text().splitlines()]
    path.write_bytes(seal([lines[0], *change(lines[1:])], lines[0])[0])


def edit_raw_lines(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Changes the lines after the first one, whatever their checksums say."""
    first, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, *change(lines)]))


def claim(path: Path, run_id: str) -> None:
    """Makes a file one of another run."""
    lines = [{k: v for k, v in json.loads(line).items() if k != SUM} for line in path.read_text().splitlines()]
    first = first_line(path.name, run_id)
    path.write_bytes(seal([first, *lines[1:]], first)[0])


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Changes a document and computes its checksum again."""
    content = json.loads(path.read_text())
    change(content)
    content.pop(SUM, None)
    path.write_text(json.dumps(seal_document(content)))
