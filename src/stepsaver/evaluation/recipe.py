"""A recipe: measured decode settings, and what they were measured with. `stepsaver tune` writes recipes.

The settings are used unchanged. If the model, precision, device, version or batch size is not the measured one, a
one-line note says so, since speed-up and drop are then unknown.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from annotated_types import Interval
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stepsaver.engine.arguments import ARGUMENTS, Whole
from stepsaver.engine.decoders.chosen import chosen_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.defaults import DECODE, DEFAULT_POLICY, Join
from stepsaver.engine.errors import UsageError, shown

Measure = Literal["accuracy", "agreement"]  # compares answers with labels, or with the answers of plain decoding
NAMED_VERSIONS = ("stepsaver", "torch")

# YAML reads a bare `on` and `off` as true and false.
JoinInYaml = Annotated[
    Join, BeforeValidator(lambda join: ("on" if join else "off") if isinstance(join, bool) else join)
]


def argument(name: str) -> Interval:
    """The range of the argument of that name, the same as on the command line and in Python."""
    kind = ARGUMENTS[name]
    assert isinstance(kind, Whole), name
    return Interval(ge=kind.low, le=kind.high)


BatchSize = Annotated[int, argument("batch_size")]
BlockSize = Annotated[int, argument("block_size")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MadeFor(_Part):
    """What a recipe was measured with."""

    model: str
    dtype: str
    device: str
    machine: str
    versions: dict[str, str]


class Figure(_Part):
    """A measured value with its interval."""

    value: float
    low: float
    high: float

    def text(self, unit: str = "") -> str:
        return f"{self.value:.2f}{unit} [{self.low:.2f}, {self.high:.2f}]"


class Measured(_Part):
    """What was confirmed, on problems that the search had not seen."""

    measure: Measure
    task: str
    problems: int = Field(ge=1)
    confidence: float = Field(gt=0, lt=1)  # of both intervals
    attempt: int = Field(default=1, ge=1)  # the number of the candidate that was confirmed
    against: str  # the baseline's settings
    max_drop: float
    speed_up: Figure  # over plain decoding
    over_autoregressive: Figure | None = None  # over one forward per token, by the same engine
    drop_points: Figure

    def __str__(self) -> str:
        of = "drop" if self.measure == "accuracy" else "loss of agreement with plain decoding"
        over = self.over_autoregressive
        also = f", {over.text('x')} of autoregressive decoding," if over else ""
        return (
            f"{self.speed_up.text('x')} of plain decoding{also} at a {of} of {self.drop_points.text()} points "
            f"on {self.problems} fresh problems of {self.task} ({100 * self.confidence:g} % confidence)"
        )


class Recipe(_Part):
    """Decoder, rules, policy, other decode settings and batch size, and what was measured with them."""

    decode: str = DECODE
    rules: tuple[str, ...] = ()
    policy: str | None = None  # of block diffusion, which alone has one
    sub_block_size: BlockSize | None = None
    join: JoinInYaml = "off"
    batch_size: BatchSize
    made_for: MadeFor | None = None
    measured: Measured | None = None

    @model_validator(mode="after")
    def _decoder_is_known(self) -> Self:
        self.decoder()
        return self

    @property
    def measured_policy(self) -> str | None:
        """The policy that was measured, whatever the model's own one is."""
        return DEFAULT_POLICY if self.policy is None and self.decode == DECODE else self.policy

    def decoder(self) -> Decoder:
        return chosen_decoder(self.decode, policy=self.policy, rules=self.rules)

    def differences(self, *, model: str, dtype: str, device: str, batch_size: int) -> str | None:
        """One line that says what differs from the measurement; None if nothing does, or if it is not known."""
        made = self.made_for
        if made is None:
            return None
        here = {"model": model, "dtype": dtype, "device": device, "batch size": str(batch_size), **versions_here()}
        then = {
            "model": made.model,
            "dtype": made.dtype,
            "device": made.device,
            "batch size": str(self.batch_size),
            **made.versions,
        }
        others = [
            f"{name} {there} (here {here.get(name, 'none')})" for name, there in then.items() if there != here.get(name)
        ]
        return (
            f"the recipe was measured with {', '.join(others)}: its figures say nothing about this" if others else None
        )


def versions_here() -> dict[str, str]:
    return {name: version(name) for name in NAMED_VERSIONS}


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe from its file. Anything wrong with it is an error of one line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "extra_forbidden") else f": {shown(first['input'])}"
        raise UsageError(f"{path} is no recipe: {where}: {what}{given}") from None


def recipe_text(recipe: Recipe) -> str:
    """The recipe as YAML. The first line says what was measured."""
    content: Mapping[str, Any] = recipe.model_dump(mode="json", exclude_none=True)
    head = f"# {recipe.measured}.\n" if recipe.measured else ""
    return head + yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=100)
