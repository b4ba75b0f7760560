"""Typed documents: what a run stores is written and read by the same classes."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError

from stepsaver.bench.judging.statistics import Interval

Number = int | float


class Stored(BaseModel):
    """A stored document, or a part of one. Other versions wrote more or less: unknown fields are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @classmethod
    def read(cls, content: object) -> Self | None:
        """Returns None if the content does not have the types that it should have: then it is something else."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None

    def as_json(self) -> dict[str, Any]:
        """Returns what was read, or all that it was made with: no default is added that a version did not write."""
        return self.model_dump(exclude_unset=True)


def _interval(value: object) -> Interval:
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(type(each) in (int, float) for each in value):
        raise ValueError("an interval is a value, its lower and its upper bound")
    return Interval(*map(float, value))


StoredInterval = Annotated[Interval, PlainValidator(_interval), PlainSerializer(list)]  # value, low, high
