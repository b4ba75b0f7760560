"""The contract of a decode policy."""

from typing import ClassVar, NamedTuple, Protocol, cast

from stepsaver.engine import registry
from stepsaver.engine.rows import Rows
from stepsaver.engine.view import StepView


class Candidates(NamedTuple):
    """The masked rows of the sub-block that have a proposal, ascending, and the probability of each proposal."""

    rows: tuple[int, ...]
    confidences: tuple[float, ...]


class DecodePolicy(Protocol):
    """A frozen dataclass: its fields are hyper-parameters and identity."""

    name: ClassVar[str]

    def choose(self, candidates: Candidates, view: StepView) -> Rows:
        """The rows to reveal, at least one: every step makes progress."""
        ...


def parse_policy(text: str) -> DecodePolicy:
    """A policy from `name:field=value,...`."""
    return cast(DecodePolicy, registry.parse(text, "stepsaver.engine.decode", "policy"))
