"""Wraps Markdown at a width: paragraphs and list items. Tables, code, headings and what cannot be broken stay."""

import re
from collections.abc import Iterator

WIDTH = 100
ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)])\s+)(?=\S)")
VERBATIM = re.compile(r"\s*(#|\||<(?!!--=)|\[[^\]]+\]:|---+$|$)|\s{4,}")  # headings, tables, HTML, link targets, code
BREAKS = re.compile(r"\s*(#+ |\||<(?!!--=)|---+$|$)")  # ends a paragraph without an empty line
# A figure with its markers, code and a link are one word each, whatever blanks are in them.
WORD = re.compile(r"(?:<!--=.*?-->.*?<!--/-->|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\S)+", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
STARTS_SOMETHING = re.compile(r"(?:[-*+>|]|#+|\d+[.)])$")  # at the start of a line it would not be text any more


def wrap(text: str, width: int = WIDTH) -> str:
    """Returns the same document with every paragraph and list item filled up to the width."""
    return "\n".join(_wrapped(text.split("\n"), width))


def overlong_lines(text: str, width: int = WIDTH) -> list[int]:
    """Returns the numbers of the lines of text that are wider and could be broken. Markers of figures do not count."""
    lines = text.split("\n")
    return [
        number
        for number, (line, is_fixed) in enumerate(zip(lines, _fixed(lines), strict=True), 1)
        if not is_fixed and not VERBATIM.match(line) and visible(line) > width and len(WORD.findall(line)) > 1
    ]


def visible(text: str) -> int:
    """Returns how wide a text is without its comments."""
    return len(COMMENT.sub("", text))


def _fixed(lines: list[str]) -> Iterator[bool]:
    """Yields whether each line belongs to a block that is left as it is: fenced code, or a comment of its own."""
    ends_with = ""
    for line in lines:
        if ends_with:
            yield True
            ends_with = "" if ends_with in line else ends_with
        elif line.lstrip().startswith("```"):
            yield True
            ends_with = "```"
        elif line.startswith("<!-- "):
            yield True
            ends_with = "" if "-->" in line else "-->"
        else:
            yield False


def _wrapped(lines: list[str], width: int) -> Iterator[str]:
    words: list[str] = []  # of the paragraph or item that is being read
    first = ""  # what its first line starts with; the others are indented as far
    for line, is_fixed in zip(lines, _fixed(lines), strict=True):
        item = ITEM.match(line)
        continues = bool(words) and not is_fixed and not item and not BREAKS.match(line)
        is_text = continues or (not is_fixed and (item is not None or not VERBATIM.match(line)))
        if words and not continues:
            yield from _filled(words, first, width)
            words = []
        if not is_text:
            yield line
            continue
        if not continues:
            first = item[1] if item else line[: len(line) - len(line.lstrip())]
        words += WORD.findall(line if continues else line[len(first) :])
    if words:
        yield from _filled(words, first, width)


def _filled(words: list[str], first: str, width: int) -> Iterator[str]:
    line, is_empty = first, True
    for word in _safe(words):
        if not is_empty and visible(line) + 1 + visible(word) > width:
            yield line
            line, is_empty = " " * len(first), True
        line, is_empty = line + (word if is_empty else f" {word}"), False
    yield line


def _safe(words: list[str]) -> Iterator[str]:
    """Yields words; those that would start a list or a heading stay on the line of the word before them."""
    kept = words[0]
    for word in words[1:]:
        if STARTS_SOMETHING.match(word):
            kept = f"{kept} {word}"
        else:
            yield kept
            kept = word
    yield kept
