"""The configs of an experiment: named combinations of rules, policy and caches, given one by one or as a grid."""

import itertools
import re
from math import prod
from typing import Any

from pydantic import Field, ValidationError, model_validator

from stepsaver.bench.experiment.conditions import Strict, Success
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.joins import Join
from stepsaver.engine.models.config import MOST_BLOCK_ROWS
from stepsaver.engine.policies.policy import policy_text
from stepsaver.engine.rules.rule import Rule, parse_rule

MOST_CONFIGS, MOST_NAME = 1000, 100
OWN_DECODING = ("prefix_cache", "block_cache", "sub_block_size")  # decoding settings that a config may override
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")  # the name of a value, and nothing else that Python's formats allow


class WithPolicy(Strict):
    """`threshold: 0.95` is short for the policy `threshold` with that value."""

    @model_validator(mode="before")
    @classmethod
    def _threshold_is_a_policy(cls, content: Any) -> Any:
        if not isinstance(content, dict) or content.get("threshold") is None:
            return content
        others = {name: value for name, value in content.items() if name != "threshold"}
        try:
            return others | {"policy": policy_text(content.get("policy"), content["threshold"])}
        except UsageError as error:
            raise ValueError(str(error)) from None


class ConfigSpec(WithPolicy):
    """One named combination of rules, policy and caches; what it leaves out comes from the experiment.

    `baseline` names another config to compare it with than the experiment's baseline. It may have success criteria of
    its own; those of a baseline hold for the configs that are compared with it and have none.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=MOST_NAME)
    rules: tuple[str, ...] = ()
    policy: str | None = None
    prefix_cache: bool | None = None
    block_cache: bool | None = None
    sub_block_size: int | None = Field(default=None, ge=1, le=MOST_BLOCK_ROWS)
    join: Join | None = None
    baseline: str | None = None
    success: Success | None = None

    def parsed_rules(self) -> tuple[Rule, ...]:
        return tuple(map(parse_rule, self.rules))


class Grid(Strict):
    """A config for every combination of some values, which are filled into patterns of its fields."""

    grid: dict[str, list[str | bool | int | float]]
    name: str
    rules: tuple[str, ...] = ()
    policy: str | None = None
    threshold: str | float | None = None
    prefix_cache: str | bool | None = None
    block_cache: str | bool | None = None
    sub_block_size: str | int | None = None
    join: str | None = None

    def configs(self) -> list[ConfigSpec]:
        count = prod(map(len, self.grid.values()))
        if count > MOST_CONFIGS:
            raise ValueError(f"the grid has {count} combinations; {MOST_CONFIGS} are allowed")
        patterns = self.model_dump(exclude={"grid"}, exclude_none=True)
        combinations = itertools.product(*self.grid.values())
        try:
            return [
                ConfigSpec.model_validate(_filled(patterns, dict(zip(self.grid, values, strict=True))))
                for values in combinations
            ]
        except KeyError as missing:
            raise ValueError(f"the pattern uses {missing}, which the grid does not have") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {shown(first['input'])}: {first['msg']}") from None


def _filled(pattern: Any, values: dict[str, Any]) -> Any:
    """Returns a pattern, or a dict or tuple of patterns, with the values filled in."""
    if isinstance(pattern, str):
        return PLACEHOLDER.sub(lambda found: str(values[found[1]]), pattern)
    if isinstance(pattern, dict):
        return {name: _filled(each, values) for name, each in pattern.items()}
    return tuple(_filled(each, values) for each in pattern) if isinstance(pattern, tuple) else pattern
