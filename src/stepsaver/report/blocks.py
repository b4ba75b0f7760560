"""What a page is made of: tabs of blocks, as JSON that its script turns into elements, text always as text."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

Block = dict[str, Any]
TableEntry = dict[str, Any]


def cell(text: str, value: float | str | None = None, *, small: str = "", tone: str = "") -> TableEntry:
    """Returns an entry of a table: its text, what it is sorted by, an interval or remark beside it, and its colour."""
    found: TableEntry = {"text": text}
    if value is not None and (isinstance(value, str) or isfinite(value)):
        found["value"] = value
    if small:
        found["small"] = small
    if tone:
        found["tone"] = tone
    return found


def number(value: float | None, form: str, *, small: str = "", factor: float = 1.0, suffix: str = "") -> TableEntry:
    """Returns an entry with a number, or a dash if there is none."""
    if value is None or not isfinite(value):
        return cell("–")
    return cell(format(factor * value, form) + suffix, value, small=small)


def interval(low: float, high: float, form: str, factor: float = 1.0) -> str:
    return f"[{factor * low:{form}}, {factor * high:{form}}]" if isfinite(low) and isfinite(high) else ""


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[TableEntry]], *, caption: str = "", name: str = ""
) -> Block:
    return {
        "kind": "table",
        "title": title,
        "caption": caption,
        "columns": list(columns),
        "rows": list(map(list, rows)),
        "name": name,
    }


def figure(title: str, content: dict[str, Any], *, caption: str = "", name: str = "", is_half: bool = False) -> Block:
    return {
        "kind": "figure",
        "title": title,
        "caption": caption,
        "figure": content,
        "name": name,
        "half": is_half,
    }


def notes(title: str, items: Sequence[tuple[str, str]], *, nothing: str = "", name: str = "") -> Block:
    """Returns lines with a level each (invalid, remark, ...); `nothing` is shown if there are none."""
    return {
        "kind": "notes",
        "title": title,
        "items": [{"level": level, "text": text} for level, text in items],
        "nothing": nothing,
        "name": name,
    }


def facts(title: str, items: Sequence[tuple[str, str]], *, name: str = "") -> Block:
    return {"kind": "facts", "title": title, "items": [list(item) for item in items], "name": name}


def tab(name: str, blocks: Sequence[Block], *, outcome: str = "", sentence: str = "") -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "sentence": sentence, "blocks": list(blocks)}
