"""What there is to choose from, by name."""

from stepsaver.engine import registry


def rules() -> dict[str, str]:
    """All reuse rules by name: what each is for. `stepsaver list rules` has their fields."""
    return _purposes("rules")


def policies() -> dict[str, str]:
    """All decode policies by name: what each is for. `stepsaver list policies` has their fields."""
    return _purposes("policies")


def _purposes(kind: str) -> dict[str, str]:
    return {name: registry.purpose_of(made) for name, made in registry.all_of(f"stepsaver.engine.{kind}").items()}
