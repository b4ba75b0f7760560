"""Checks of an experiment's file that no type can express: names that exist, baselines, layer groups of equal size."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stepsaver.bench.experiment import ConfigSpec, DecodingSpec, Experiment, ExperimentSpec, Grid
from stepsaver.engine.decoders.chosen import parse_decoder
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
    with _at("decoding", "decode"):
        parse_decoder(spec.decoding.decode)
    groups: dict[str, frozenset[int]] = {}
    for index, config in enumerate(configs):
        with _at("configs", "rules" if is_grid else index):
            groups |= _layer_groups(config, spec.decoding, layers)
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


def _layer_groups(config: ConfigSpec, decoding: DecodingSpec, layers: int | None) -> dict[str, frozenset[int]]:
    """Returns the layers that a config's rules choose, if the depth is known. Raises for a wrong decoder, rule or
    policy.
    """
    rules = config.decoder(decoding).rules
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


FILE = "experiment.yaml"


def read_experiment(folder: Path, *, layers: int | None = None) -> Experiment:
    """Reads and checks an experiment; if the model's number of `layers` is known, its layer groups too."""
    path = folder / FILE
    if not path.exists():
        raise UsageError(f"{folder} has no {FILE}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    try:
        content = yaml.load(text, UniqueKeys)
        spec = ExperimentSpec.model_validate(content)
        configs = tuple(spec.configs.configs() if isinstance(spec.configs, Grid) else spec.configs)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise _located(path, text, error) from None
    except ValueError as error:
        raise UsageError(f"{path} line {_line(text, ('configs',))}: configs: {error}") from None
    try:
        remarks = check_spec(spec, configs, layers)
    except MistakeAt as error:
        raise UsageError(f"{path} line {_line(text, error.keys)}: {error}") from None
    return Experiment(folder, spec, configs, remarks)


class UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a repeated key, whose first value would be lost silently, and text that cannot be written."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if any("\ud800" <= each <= "\udfff" for each in str(node.value)):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: half of a surrogate pair is no character")
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {shown(key.value)} stands there twice")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _located(path: Path, text: str, error: ValidationError) -> UsageError:
    """Returns the first complaint that is not about the form of `configs` (list or grid) that the file does not use."""
    content = yaml.safe_load(text)
    is_grid = isinstance(content, dict) and isinstance(content.get("configs"), dict)
    wrong_form = "list[ConfigSpec]" if is_grid else "Grid"
    complaints = [each for each in error.errors() if wrong_form not in map(str, each["loc"])]
    complaints.sort(key=lambda each: each["type"] != "extra_forbidden")  # a mistyped key is also a missing one
    first = (complaints or error.errors())[0]
    keys = tuple(each for each in first["loc"] if each not in ("Grid", "list[ConfigSpec]"))
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return UsageError(f"{path} line {_line(text, keys)}: {'.'.join(map(str, keys)) or 'the file'}: {message}")


def _line(text: str, keys: tuple[Any, ...]) -> int:
    """Returns the line of the innermost node that the keys still lead to."""
    node = yaml.compose(text)
    line = 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(key)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return line
