"""What a tuner may try of the fields of a rule or policy: declared where the field is, as its metadata.

Every field says `tuned(...)`, with the values to try from the most careful to the cheapest, or `not_tuned(why)`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

TUNED, NOT_TUNED = "tuned", "not tuned"
BY_DRIFT = "by drift"  # instead of a value: groups of layers that `calibrate` proposes for a model


class Tuned(NamedTuple):
    values: tuple[Any, ...]
    is_ordered: bool  # the later, the cheaper; else each value is a kind of its own


def tuned(*values: Any, is_ordered: bool = True) -> Mapping[str, Any]:
    return {TUNED: Tuned(values, is_ordered)}


def not_tuned(why: str) -> Mapping[str, Any]:
    return {NOT_TUNED: why}


def tuned_fields(made: type) -> dict[str, Tuned]:
    """By name, the fields of a rule or policy that are tuned."""
    fields = dataclasses.fields(made)
    return {field.name: field.metadata[TUNED] for field in fields if TUNED in field.metadata}
