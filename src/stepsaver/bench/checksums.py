"""Lines and documents with checksums: a file of results says which run it belongs to, and shows if it was altered.

The first line of a file names the file and its run. Every line ends with a checksum of itself, of the line before and
of that name, so a line that was changed, taken out, put in, doubled or swapped, or is from another run, is found. There
is no secret in it: somebody who computes the checksums again is not found out.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SUM = "sum"
FORMAT = 3
ENDING = re.compile(rb', "sum": "([0-9a-f]{16})"\}\Z')


class Line(NamedTuple):
    """A line of a file. One that cannot be read has no content, and the line after it does not hold."""

    number: int  # in the file, from 1
    raw: bytes
    content: dict[str, Any]
    sum: str | None
    holds: bool  # its checksum is right


def first_line(file: str, run_id: str) -> dict[str, Any]:
    return {"format": FORMAT, "file": file, "run": run_id}


def seal(contents: Iterable[Mapping[str, Any]], first: Mapping[str, Any], after: str = "") -> tuple[bytes, str]:
    """Returns the lines as they are stored after a line with the checksum `after`, and the checksum of the last one.

    `first` is the content of the file's first line, which may be among them.
    """
    raw, name = [], _name(first)
    for content in contents:
        payload = json.dumps(dict(content)).encode()
        after = _checksum(payload, name + after)
        raw.append(payload[:-1] + f', "{SUM}": "{after}"}}\n'.encode())
    return b"".join(raw), after


def read_lines(content: bytes) -> tuple[list[Line], bytes]:
    """Returns the lines of a file, and what an unfinished write left after the last of them."""
    *whole, tail = content.split(b"\n")
    lines: list[Line] = []
    name = _name(_parsed(whole[0])) if whole else ""
    after: str | None = ""
    seen: set[str | None] = {None}
    for number, raw in enumerate(whole, start=1):
        found, stated = _parsed(raw), ENDING.search(raw)
        own = stated[1].decode() if stated and found else None
        payload = raw[: stated.start()] + b"}" if stated else raw
        # a repeated checksum is that of a copied line, which would hold after a copy of the line before it
        holds = own not in seen and after is not None and own == _checksum(payload, name + after)
        found.pop(SUM, None)
        lines.append(Line(number, raw + b"\n", found, own, holds))
        after = own
        seen.add(own)
    return lines, tail


def reseal(content: bytes) -> bytes:
    """Returns the lines with checksums that hold again, after some lines were taken out."""
    contents = [line.content for line in read_lines(content)[0]]
    return seal(contents, contents[0])[0] if contents else b""


def last_sum(content: bytes) -> str:
    """Returns the checksum of the last line."""
    found = read_lines(content)[0][-1].sum
    assert found is not None, "only lines that hold are kept"
    return found


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _name(first: Mapping[str, Any]) -> str:
    return f"{first.get('run')} {first.get('file')} "


def _checksum(payload: bytes, after: str) -> str:
    return hashlib.sha256(after.encode() + payload).hexdigest()[:16]


def seal_document(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON document with its checksum added."""
    plain = json.loads(json.dumps(content, default=str))
    return {**plain, SUM: _document_sum(plain)}


def document_holds(content: Mapping[str, Any]) -> bool:
    return content.get(SUM) == _document_sum({name: value for name, value in content.items() if name != SUM})


def _document_sum(content: Mapping[str, Any]) -> str:
    return _checksum(json.dumps(content, sort_keys=True).encode(), "")
