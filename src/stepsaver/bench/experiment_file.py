"""Reads `experiment.yaml`, strictly: all mistakes are answered in one line, each with its line in the file."""

import difflib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stepsaver.bench.experiment import ConfigSpec, DecodingSpec, Experiment, ExperimentSpec, Grid
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.rules.layer_reuse import layer_group

FILE = "experiment.yaml"
MOST_MISTAKES = 10  # that are said at once
FORMS = ("Grid", "list[ConfigSpec]")  # of `configs`, as pydantic calls them

Keys = tuple[str | int, ...]  # the keys that lead to a value in the file
Depth = Callable[[str], int | None]  # the number of layers of a model, if it is known


class MistakeAt(UsageError):
    """A mistake, and the keys that lead to it."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(message)
        self.keys = keys


def read_experiment(folder: Path, *, layers: int | Depth | None = None) -> Experiment:
    """Reads and checks an experiment; if its model's number of `layers` is known, its layer groups too."""
    path = folder / FILE
    text = _text(path)
    try:
        loader = UniqueKeys(text)
        node = loader.get_single_node()
        content = loader.construct_document(node) if node else None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        spec = ExperimentSpec.model_validate(content)
    except ValidationError as error:
        raise _said(path, node, _typed_mistakes(error, content)) from None
    try:
        configs = tuple(spec.configs.configs() if isinstance(spec.configs, Grid) else spec.configs)
    except ValueError as error:
        raise _said(path, node, [MistakeAt(("configs",), f"configs: {error}")]) from None
    depth = layers(spec.model) if callable(layers) else layers
    if mistakes := list(find_mistakes(spec, configs, depth)):
        raise _said(path, node, mistakes)
    return Experiment(folder, spec, configs, tuple(_overlaps(spec, configs, depth)), text=text)


def has_changed(experiment: Experiment) -> bool:
    """Whether an experiment's file says something else by now than when it was read."""
    try:
        return experiment.text is not None and _text(experiment.folder / FILE) != experiment.text
    except UsageError:
        return True


def _text(path: Path) -> str:
    if not path.exists():
        raise UsageError(f"{path.parent} has no {path.name}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


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


def find_mistakes(spec: ExperimentSpec, configs: tuple[ConfigSpec, ...], layers: int | None) -> Iterator[MistakeAt]:
    """Yields what no type can express: names that do not exist, baselines, rules and layers that cannot be."""
    is_grid = isinstance(spec.configs, Grid)
    by_name = {config.name: config for config in configs}
    for index, config in enumerate(configs):
        if config is not by_name[config.name]:
            yield MistakeAt(("configs", "name" if is_grid else index), f"config {config.name} stands there twice")
    if spec.baseline not in by_name:
        yield MistakeAt(("baseline",), f"baseline {_unknown(spec.baseline, by_name)}")
    for key, parse in (("policy", parse_policy), ("decode", parse_decoder)):
        with _found() as mistakes, _at("decoding", key):
            parse(getattr(spec.decoding, key))
        yield from mistakes
    if mistakes:
        return  # every config that names none would say the same
    groups: dict[str, frozenset[int]] = {}
    for index, config in enumerate(configs):
        with _found() as mistakes, _at("configs", index, "baseline"):
            _check_baseline(config, by_name, is_own=config.name == spec.baseline)
        yield from mistakes
        with _found() as mistakes, _at("configs", "rules" if is_grid else index):
            groups |= layer_groups(config, spec.decoding, layers)
        yield from mistakes
        if mistakes and is_grid:
            return  # the pattern is wrong: its other configs say the same
    if is_grid and len({len(group) for group in groups.values()}) > 1:
        sizes = ", ".join(f"{name} has {len(group)}" for name, group in groups.items())
        yield MistakeAt(("configs", "grid"), f"the grid compares layer groups of unequal size: {sizes}")


@contextmanager
def _found() -> Iterator[list[MistakeAt]]:
    """Keeps a mistake that is raised inside."""
    found: list[MistakeAt] = []
    try:
        yield found
    except MistakeAt as error:
        found.append(error)


@contextmanager
def _at(*keys: str | int) -> Iterator[None]:
    """Adds the keys to a usage error that is raised inside."""
    try:
        yield
    except UsageError as error:
        raise MistakeAt(keys, str(error)) from None


def _check_baseline(config: ConfigSpec, configs: dict[str, ConfigSpec], *, is_own: bool) -> None:
    named = config.baseline
    if named is None:
        return
    if named not in configs:
        raise UsageError(f"baseline {_unknown(named, configs)}")
    if is_own or named == config.name:
        raise UsageError(f"config {config.name} is a baseline and cannot be compared with {named}")
    if configs[named].tasks is not None:
        raise UsageError(f"baseline {named} has to be run on all tasks")
    if configs[named].baseline:
        raise UsageError(f"baseline {named} is itself compared with {configs[named].baseline}; name that one")


def _unknown(name: str, configs: dict[str, ConfigSpec]) -> str:
    near = difflib.get_close_matches(name, configs, n=3, cutoff=0.5) or list(configs)
    return f"{shown(name)} is no config; there are {', '.join(near)}"


def layer_groups(config: ConfigSpec, decoding: DecodingSpec, layers: int | None) -> dict[str, frozenset[int]]:
    """Returns the layers that a config's rules choose, by the group's name, if the depth is known. Raises for a
    decoder, rule or policy that is wrong or does not fit.
    """
    rules = config.decoder(decoding).rules
    if layers is None:
        return {}
    named = [text for rule in rules if isinstance(text := getattr(rule, "layers", None), str)]
    return {text: layer_group(text, layers) for text in named}


def _overlaps(spec: ExperimentSpec, configs: tuple[ConfigSpec, ...], layers: int | None) -> Iterator[str]:
    groups = {name: group for each in configs for name, group in layer_groups(each, spec.decoding, layers).items()}
    for one, other in itertools.combinations(groups, 2):
        if groups[one] & groups[other] and groups[one] != groups[other]:
            yield f"layer groups {one} and {other} share {len(groups[one] & groups[other])} layers"


def _typed_mistakes(error: ValidationError, content: Any) -> Iterator[MistakeAt]:
    """Yields complaints about types and names, but not about the form of `configs` (list or grid) that the file does
    not use, nor about a missing key that stands there mistyped.
    """
    is_grid = isinstance(content, dict) and isinstance(content.get("configs"), dict)
    wrong_form = FORMS[is_grid]
    complaints = [each for each in error.errors() if wrong_form not in map(str, each["loc"])] or error.errors()
    mistyped = {name for each in complaints if each["type"] == "extra_forbidden" for name in _near(each)}
    for each in complaints:
        if each["type"] == "missing" and each["loc"][-1] in mistyped:
            continue
        keys = tuple(key for key in each["loc"] if key not in FORMS)
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            near = _near(each)
            message = f"unknown key; nearest: {', '.join(near)}" if near else "unknown key"
        yield MistakeAt(keys, f"{'.'.join(map(str, keys)) or 'the file'}: {message}")


def _near(complaint: ErrorDetails) -> list[str]:
    """Returns the keys that stand beside an unknown one in the model that refused it, as far as they are like it."""
    *path, name = complaint["loc"]
    model: Any = ExperimentSpec
    for key in path:
        if key in FORMS:
            model = Grid if key == "Grid" else ConfigSpec
        elif isinstance(key, str):
            field = model.model_fields.get(key) if _is_model(model) else None
            model = next(filter(_is_model, [field.annotation, *get_args(field.annotation)]), None) if field else None
    return difflib.get_close_matches(str(name), model.model_fields, n=3, cutoff=0.5) if _is_model(model) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _said(path: Path, node: Any, mistakes: Iterator[MistakeAt] | list[MistakeAt]) -> UsageError:
    """Returns one error for all mistakes, in the file's order."""
    lines = sorted({(_line(node, each.keys), str(each)): None for each in mistakes})
    said = [f"line {line}: {message}" for line, message in lines[:MOST_MISTAKES]]
    more = [f"and {len(lines) - MOST_MISTAKES} more"] if len(lines) > MOST_MISTAKES else []
    return UsageError(f"{path} {'; '.join([*said, *more])}")


def _line(node: Any, keys: Keys) -> int:
    """Returns the line of the innermost node that the keys still lead to."""
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
