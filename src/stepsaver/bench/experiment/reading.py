"""Reads `experiment.yaml`, strictly: a mistake is answered with one line, which says where in the file it is."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stepsaver.bench.experiment.checks import MistakeAt, check_spec
from stepsaver.bench.experiment.configs import Grid
from stepsaver.bench.experiment.spec import Experiment, ExperimentSpec
from stepsaver.engine.errors import UsageError, shown

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
