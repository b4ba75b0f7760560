"""Checks of an experiment's file that no type can express: names that exist, baselines, layer groups of equal size."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from stepsaver.bench.experiment.configs import ConfigSpec, Grid
from stepsaver.bench.experiment.spec import ExperimentSpec
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import parse_policy

Keys = tuple[str | int, ...]  # the keys that lead to a value in the file


class MistakeAt(UsageError):
    """A mistake, and the keys that lead to it."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(message)
        self.keys = keys


@contextmanager
def _at(*keys: str | int) -> Iterator[None]:
    """Adds the keys to a usage error that is raised inside."""
    try:
        yield
    except UsageError as error:
        raise MistakeAt(keys, str(error)) from None


def check_spec(spec: ExperimentSpec, configs: tuple[ConfigSpec, ...], layers: int | None) -> tuple[str, ...]:
    """Raises for the first mistake. Returns remarks on layer groups that overlap, if the number of layers is known."""
    is_grid = isinstance(spec.configs, Grid)
    names = [config.name for config in configs]
    for index, name in enumerate(names):
        if name in names[:index]:
            keys: Keys = ("configs", "name") if is_grid else ("configs", index)
            raise MistakeAt(keys, f"config {name} stands there twice")
    if spec.baseline not in names:
        raise MistakeAt(("baseline",), f"baseline {shown(spec.baseline)} is no config; there are {', '.join(names)}")
    for index, config in enumerate(configs):
        with _at("configs", index, "baseline"):
            _check_baseline(config, {each.name: each for each in configs}, is_own=config.name == spec.baseline)
    with _at("decoding", "policy"):
        parse_policy(spec.decoding.policy)
    groups: dict[str, frozenset[int]] = {}
    for index, config in enumerate(configs):
        with _at("configs", "rules" if is_grid else index):
            groups |= _layer_groups(config, layers)
    if is_grid and len({len(group) for group in groups.values()}) > 1:
        sizes = ", ".join(f"{name} has {len(group)}" for name, group in groups.items())
        raise MistakeAt(("configs", "grid"), f"the grid compares layer groups of unequal size: {sizes}")
    return tuple(_overlaps(groups))


def _check_baseline(config: ConfigSpec, configs: dict[str, ConfigSpec], *, is_own: bool) -> None:
    named = config.baseline
    if named is None:
        return
    if named not in configs:
        raise UsageError(f"baseline {named!r} is no config; there are {', '.join(configs)}")
    if is_own or named == config.name:
        raise UsageError(f"config {config.name} is a baseline and cannot be compared with {named}")
    if configs[named].baseline:
        raise UsageError(f"baseline {named} is itself compared with {configs[named].baseline}; name that one")


def _layer_groups(config: ConfigSpec, layers: int | None) -> dict[str, frozenset[int]]:
    """Returns the layers that a config's rules choose, if the depth is known. Raises for a wrong rule or policy."""
    if config.policy:
        parse_policy(config.policy)
    rules = config.parsed_rules()
    if layers is None:
        return {}
    for rule in rules:
        rule.check(layers)
    return {name: group for rule in rules for name, group in rule.layer_groups(layers).items()}


def _overlaps(groups: dict[str, frozenset[int]]) -> list[str]:
    return [
        f"layer groups {one} and {other} share {len(groups[one] & groups[other])} layers"
        for one, other in itertools.combinations(groups, 2)
        if groups[one] & groups[other] and groups[one] != groups[other]
    ]
