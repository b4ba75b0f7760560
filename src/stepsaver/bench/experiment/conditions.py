"""When a hypothesis is confirmed or rejected: bounds on the speed-up and on the drop of accuracy."""

import re
from math import isfinite
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from stepsaver.engine.errors import shown

CONDITION = re.compile(r"([<>])\s*(-?\d+(?:\.\d+)?)(\s+measured)?")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(Strict):
    """A bound on a number, written `> 1.2`: its whole interval has to meet it; with `> 1.2 measured` the value."""

    sign: Literal["<", ">"]
    bound: float
    is_measured: bool = False

    @classmethod
    def parse(cls, text: object) -> "Condition":
        match = CONDITION.fullmatch(text.strip()) if isinstance(text, str) else None
        if not match or not isfinite(float(match[2])):
            raise ValueError(f"{shown(text)} is no condition such as '> 1.2'")
        return cls(sign="<" if match[1] == "<" else ">", bound=float(match[2]), is_measured=match[3] is not None)

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}" + " measured" * self.is_measured


class Criterion(Strict):
    """Bounds on the speed-up against the baseline and on the drop of accuracy in points."""

    speed_up: Condition
    drop_points: Condition

    @field_validator("speed_up", "drop_points", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return value if isinstance(value, Condition) else Condition.parse(value)


class Success(Strict):
    """A config confirms if it meets both bounds of `confirm_if`; it is rejected if it meets either of `reject_if`."""

    confirm_if: Criterion
    reject_if: Criterion
