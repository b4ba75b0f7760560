"""Ways to spoil what a user gives: values of a wrong kind or size, keys that are gone, bytes that are."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP = "[" * 100_000
NUMBERS = [
    0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    10_000, 1_000_000, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400,
]  # fmt: skip
TEXTS = [
    "", " ", "x", "0", "nan", "none", "null", "../x", "/", "é\u202e", "\x00", "\x1b[2J", "\ud800", "a" * 300, "{0}",
    "{k[0]}", "{{ 1/0 }}", "all", "first", "\n", "%s",
]  # fmt: skip
HOLDERS: list[Any] = [None, True, False, [], {}, [None], [[]], {"x": 1}, [1, 2, 3], ["x"], {"": None}]
VALUES: list[Any] = [*NUMBERS, *TEXTS, *HOLDERS]

values = st.sampled_from(VALUES).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=8)


def places(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value of a document."""
    keys = tree.keys() if isinstance(tree, dict) else range(min(len(tree), 6)) if isinstance(tree, list) else ()
    found = [(*prefix, key) for key in keys]
    return found + [place for key in keys for place in places(tree[key], (*prefix, key))]


@st.composite
def spoiled(draw: st.DrawFn, tree: Any, fields: tuple[str, ...] = ()) -> Any:
    """A document with one to three values replaced, removed or added. `fields` are keys that it might also have."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        known = places(tree)
        outer = [(name,) for name in fields] if isinstance(tree, dict) else []
        if not known and not outer:
            return draw(values)
        *path, last = draw(st.sampled_from(known + outer))
        holder = tree
        for key in path:
            holder = holder[key]
        if draw(st.integers(0, 5)) == 0 and last in (holder if isinstance(holder, dict) else range(len(holder))):
            del holder[last]
        else:
            holder[last] = draw(values)
    return tree


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Flipped, cut, doubled, emptied, not UTF-8, or nested too deep."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "empty", "latin", "deep", "brackets", "mark"]))
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "flip" and content:
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    if kind == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=6)) + content[place:]
    if kind == "repeat":
        return content + content[place:]
    if kind == "empty":
        return b""
    if kind == "latin":
        return content[:place] + b"\xff\xfe" + content[place:]
    if kind == "mark":
        return b"\xef\xbb\xbf" + content
    return (DEEP if kind == "deep" else "[" * 400 + "]" * 400).encode()
