"""Names for groups of layers: `first`, `middle`, `last`, `thirds:1` to `thirds:3`, `all`, or `4-9,12`."""

import re
from functools import lru_cache

from stepsaver.engine.errors import UsageError

# `first`, `middle` and `last` are the groups of the source's experiment: its model had 28 layers, each group 12.
SOURCE_LAYERS, SOURCE_GROUP = 28, 12
GROUP_NAMES = ("first", "middle", "last", "thirds:1", "thirds:2", "thirds:3", "all")


def group_size(layers: int) -> int:
    """How many layers `first`, `middle` and `last` have: the same share of the depth as in the source."""
    return max(1, round(SOURCE_GROUP * layers / SOURCE_LAYERS))


@lru_cache(maxsize=256)
def layer_group(text: str, layers: int) -> frozenset[int]:
    """The layers of a group in a model of `layers` layers.

    At the source's depth, `first`, `middle` and `last` are what its code really chose: 1-12, 8-19 and 16-27, which
    overlap. They are scaled to other depths. The thirds are equal and disjoint. If the depth is not a multiple of
    three, the last one or two layers are in none of them.
    """
    size = group_size(layers)
    third = layers // 3
    starts = {
        "first": (min(1, layers - size), size),
        "middle": ((layers - size) // 2, size),
        "last": (layers - size, size),
        "thirds:1": (0, third),
        "thirds:2": (third, third),
        "thirds:3": (2 * third, third),
        "all": (0, layers),
    }
    if text in starts:
        start, count = starts[text]
        if not count:
            raise UsageError(f"layers {text!r}: a model of {layers} layer{'s' * (layers > 1)} has no thirds")
        return frozenset(range(start, min(start + count, layers)))
    return _explicit(text, layers)


def check_group_name(text: str) -> None:
    """Refuses a name that is wrong for every depth."""
    if text not in GROUP_NAMES:
        _ranges(text)


def _explicit(text: str, layers: int) -> frozenset[int]:
    chosen: set[int] = set()
    for item, first, last in _ranges(text):
        if last >= layers:
            raise UsageError(f"layers {text!r}: {item!r} is not within 0-{layers - 1}")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def _ranges(text: str) -> list[tuple[str, int, int]]:
    """Each item of `4-9,12` with its first and last layer."""
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise UsageError(
                f"layers {text!r}: {item!r} is no range; allowed: {', '.join(GROUP_NAMES)}, or like 4-9,12"
            )
        found.append((item, int(match[1]), int(match[2] or match[1])))
    return found
