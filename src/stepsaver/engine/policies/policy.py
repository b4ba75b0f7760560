"""The contract of a decode policy."""

from typing import ClassVar, NamedTuple, Protocol, cast

from stepsaver.engine import registry
from stepsaver.engine.defaults import DEFAULT_POLICY
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.positions import Positions
from stepsaver.engine.view import StepView


class Candidates(NamedTuple):
    """The masked positions of the sub-block that have a proposal, ascending, and the probability of each proposal."""

    positions: tuple[int, ...]
    confidences: tuple[float, ...]


class Policy(Protocol):
    """Which positions a denoising step unmasks. A frozen dataclass; its fields are its hyper-parameters and identify
    it.
    """

    name: ClassVar[str]

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        """The positions to unmask. At least one, so that every step makes progress."""
        ...


def by_confidence(candidates: Candidates) -> list[tuple[int, float]]:
    """Positions and confidences, the most confident first; of equals, the first position first."""
    pairs = zip(candidates.positions, candidates.confidences, strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def parse_policy(text: str) -> Policy:
    """A policy from `name:field=value,...`."""
    if text.partition(":")[0] == "verified":
        decoder = text.replace("verified", "speculative", 1)
        raise UsageError(f"policy {shown(text)} is a decoder now: --decode {decoder}")
    return cast(Policy, registry.parse(text, "stepsaver.engine.policies", "policy"))


def policy_text(policy: str | None, threshold: float | None, default: str = DEFAULT_POLICY) -> str:
    """The text of the policy that a user chose, by a policy or only by a threshold; else that of the `default`."""
    if threshold is None:
        return policy or default
    if policy not in (None, DEFAULT_POLICY):
        raise UsageError(
            f"policy {policy!r} and threshold {threshold} exclude each other; "
            f"a policy that has one takes it as a field, as in {DEFAULT_POLICY}:threshold={threshold}"
        )
    own = default if default.partition(":")[0] == DEFAULT_POLICY else DEFAULT_POLICY
    return f"{own}{',' if ':' in own else ':'}threshold={threshold}"


def chosen_policy(policy: str | Policy | None, threshold: float | None, default: str = DEFAULT_POLICY) -> Policy:
    """The policy that Python code chose: by text, by an object, or only by a threshold."""
    if policy is None or isinstance(policy, str):
        return parse_policy(policy_text(policy, threshold, default))
    if not all(hasattr(type(policy), each) for each in ("name", "choose")):
        raise UsageError(
            f"{shown(policy)} is no policy: expected text such as 'threshold', or an object of such a class"
        )
    if threshold is not None:
        raise UsageError(f"policy {policy.name} and threshold {threshold} exclude each other")
    return policy
