"""Which values a tuner may try for a field of a rule or policy. They are declared with the field, as its metadata.

Every field says `tuned(...)`, with the values to try from the most careful to the cheapest, or `not_tuned(why)`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

TUNED, NOT_TUNED = "tuned", "not tuned"


class Tuned(NamedTuple):
    values: tuple[Any, ...]
    is_ordered: bool  # later values are cheaper; if False, the order means nothing


def tuned(*values: Any, is_ordered: bool = True) -> Mapping[str, Any]:
    return {TUNED: Tuned(values, is_ordered)}


def not_tuned(why: str) -> Mapping[str, Any]:
    return {NOT_TUNED: why}


def tuned_fields(made: type) -> dict[str, Tuned]:
    """The tuned fields of a rule or policy, by name."""
    fields = dataclasses.fields(made)
    return {field.name: field.metadata[TUNED] for field in fields if TUNED in field.metadata}
