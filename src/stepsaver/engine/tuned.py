"""Which values `tune` may try for a field of a rule, policy or decoder: metadata of the field, if there are any."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

TUNED = "tuned"


class Tuned(NamedTuple):
    values: tuple[Any, ...]  # from the most careful to the cheapest
    is_ordered: bool  # later values are cheaper; if False, the order means nothing


def tuned(*values: Any, is_ordered: bool = True) -> Mapping[str, Any]:
    return {TUNED: Tuned(values, is_ordered)}


def tuned_fields(made: type) -> dict[str, Tuned]:
    """The tuned fields of a class, by name."""
    fields = dataclasses.fields(made)
    return {field.name: field.metadata[TUNED] for field in fields if TUNED in field.metadata}
