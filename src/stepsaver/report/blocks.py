"""What a page is made of: tabs of blocks, as JSON that its script turns into elements, text always as text.

The same tables are printed in a terminal, and written into Markdown.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

Block = dict[str, Any]
TableEntry = dict[str, Any]
Row = Sequence[TableEntry]
TERMINAL = 80  # columns
LEAST_NAME = 10


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


def named(text: str, *, small: str = "", tone: str = "") -> TableEntry:
    """Returns an entry that is sorted by its text."""
    return cell(text, text, small=small, tone=tone)


def number(value: float | None, form: str, *, small: str = "", factor: float = 1.0, suffix: str = "") -> TableEntry:
    """Returns an entry with a number, or a dash if there is none."""
    if value is None or not isfinite(value):
        return cell("-")
    return cell(_formatted(factor * value, form) + suffix, value, small=small)


def estimate(values: Sequence[float], form: str, *, factor: float = 1.0, suffix: str = "") -> TableEntry:
    """Returns an entry with a number and its interval."""
    value, low, high = values
    return number(value, form, small=interval(low, high, form, factor), factor=factor, suffix=suffix)


def interval(low: float, high: float, form: str, factor: float = 1.0) -> str:
    if not (isfinite(low) and isfinite(high)):
        return ""
    return f"[{_formatted(factor * low, form)}, {_formatted(factor * high, form)}]"


def _formatted(value: float, form: str) -> str:
    text = format(value, form)
    return text.removeprefix("-") if not text.strip("-0.") else text  # there is no -0.0


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    caption: str = "",
    name: str = "",
    is_folded: bool = False,
) -> Block:
    content = {"columns": list(columns), "rows": list(map(list, rows))}
    return _block("table", title, name, caption=caption, folded=is_folded, **content)


def figure(title: str, content: dict[str, Any], *, caption: str = "", name: str = "", is_half: bool = False) -> Block:
    return _block("figure", title, name, caption=caption, half=is_half, figure=content)


def notes(
    title: str, items: Sequence[tuple[str, str]], *, nothing: str = "", name: str = "", is_folded: bool = False
) -> Block:
    """Returns lines with a level each (invalid, remark, ...); `nothing` is shown if there are none."""
    lines = [{"level": level, "text": text} for level, text in items]
    return _block("notes", title, name, items=lines, nothing=nothing, folded=is_folded)


def facts(title: str, items: Sequence[tuple[str, str]], *, name: str = "", is_folded: bool = False) -> Block:
    return _block("facts", title, name, items=[list(item) for item in items], folded=is_folded)


def _block(kind: str, title: str, name: str, **content: Any) -> Block:
    return {"kind": kind, "title": title, "name": name, **content}


def tab(name: str, blocks: Sequence[Block], *, outcome: str = "", sentence: str = "") -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "sentence": sentence, "blocks": list(blocks)}


def text_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the rows as text, intervals and remarks behind what they belong to."""
    return [tuple(map(_text, row)) for row in rows]


def _text(entry: TableEntry) -> str:
    small = entry.get("small", "")
    return entry["text"] + (f"{' ' if small.startswith('[') else ': '}{small}" if small else "")


def bare(row: Row) -> Row:
    """Returns entries without what stands beside them."""
    return [{"text": each["text"]} for each in row]


def plain_table(rows: Sequence[tuple[str, ...]], columns: Sequence[str], *, width: int | None = None) -> str:
    """Returns a table for a terminal. In one of a given width, names in the first column are broken if need be."""
    lines = [tuple(columns), *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    if width is not None:
        widths[0] = max(LEAST_NAME, min(widths[0], width - sum(widths[1:]) - 2 * len(widths[1:])))
    printed = []
    for first, *others in lines:
        name, *rest = _broken(first, widths[0])
        printed.append("  ".join(each.ljust(size) for each, size in zip((name, *others), widths, strict=True)))
        printed += rest
    return "\n".join(line.rstrip() for line in printed)


def _broken(name: str, width: int) -> list[str]:
    """Returns the lines of a name, broken behind underscores if it has any."""
    if len(name) <= width:
        return [name]
    place = name.rfind("_", 1, width) + 1 or width
    return [name[:place], *(f"  {each}" for each in _broken(name[place:], width - 2))]


def markdown_table(rows: Sequence[tuple[str, ...]], columns: Sequence[str]) -> str:
    lines = [tuple(columns), tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(block: Block) -> str:
    """Returns a table, with its caption, or notes."""
    if block["kind"] == "notes":
        return "\n".join(f"- {item['text']}" for item in block["items"]) or block["nothing"]
    parts = [block["caption"], markdown_table(text_rows(block["rows"]), block["columns"])]
    return "\n\n".join(filter(None, parts))
