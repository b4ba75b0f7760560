"""Names for groups of layers: `first`, `middle`, `last` (12 of 28), `thirds:1` to `thirds:3`, `all`, or `4-9,12`."""

import re
from functools import lru_cache

from stepsaver.engine.errors import UsageError

GROUP_NAMES = ("first", "middle", "last", "thirds:1", "thirds:2", "thirds:3", "all")


@lru_cache(maxsize=256)
def layer_group(text: str, layers: int) -> frozenset[int]:
    """The layers of a group in a model of so many layers.

    `first`, `middle` and `last` are the 12 of 28 layers that the source's code really chose (1-12, 8-19 and 16-27, so
    the last two overlap), scaled to other depths. The thirds are equal and disjoint; layers that do not divide by three
    stay out.
    """
    size = max(1, round(12 * layers / 28))
    third = layers // 3
    starts = {
        "first": (1, size),
        "middle": ((layers - size) // 2, size),
        "last": (layers - size, size),
        "thirds:1": (0, third),
        "thirds:2": (third, third),
        "thirds:3": (2 * third, third),
        "all": (0, layers),
    }
    if text in starts:
        start, count = starts[text]
        return frozenset(range(start, min(start + count, layers)))
    return _explicit(text, layers)


def _explicit(text: str, layers: int) -> frozenset[int]:
    chosen: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not match:
            raise UsageError(
                f"layers {text!r}: {item!r} is no range; allowed: {', '.join(GROUP_NAMES)}, or like 4-9,12"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= layers:
            raise UsageError(f"layers {text!r}: {item!r} is not within 0-{layers - 1}")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)
