"""`experiment.yaml`: what an experiment asks and compares. Strict: a mistake is one line with its place in the file."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import BATCH_SIZE, NEW_TOKENS, WEIGHTS, Weights
from stepsaver.engine.errors import UsageError, shown, unknown_name
from stepsaver.engine.estimators import Estimator
from stepsaver.engine.joins import Join
from stepsaver.engine.models.config import MOST_BLOCK_ROWS
from stepsaver.engine.policies.policy import DEFAULT_POLICY, parse_policy, policy_text
from stepsaver.engine.rules.rule import Rule, parse_rule

FILE = "experiment.yaml"
# What jobs are submitted with already, and where that is said.
OWN_SBATCH_OPTIONS = {
    "partition": "`partition`", "account": "`account`", "gres": "`gres`", "cpus-per-task": "`cpus`",
    "mem": "`memory_gb`", "time": "`minutes`", "array": "the number of shards", "job-name": "the experiment's name",
    "output": "the folder of logs", "error": "the folder of logs", "requeue": "the runner", "no-requeue": "the runner",
    "signal": "the runner", "open-mode": "the runner",
}  # fmt: skip
SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*")
MOST_CONFIGS, MOST_NAME, MOST_COUNT = 1000, 100, 1 << 30
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")  # the name of a value, and nothing of what Python's formats can do
CONDITION = re.compile(r"([<>])\s*(-?\d+(?:\.\d+)?)(\s+measured)?")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(Strict):
    """A bound on a number, written `> 1.2`: its whole interval has to hold it. `> 1.2 measured` looks at the value."""

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


class WithPolicy(Strict):
    """`threshold: 0.95` is short for the policy of that name with that value."""

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
    """One named combination of rules, policy and caches; what it does not say is the experiment's.

    It may be compared with another config than the experiment's baseline, and it may have success criteria of its own.
    Those of a baseline hold for whatever is compared with it.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=MOST_NAME)
    rules: tuple[str, ...] = ()
    policy: str | None = None
    prefix_cache: bool | None = None
    block_cache: bool | None = None
    join: Join | None = None
    baseline: str | None = None
    success: Success | None = None

    def parsed_rules(self) -> tuple[Rule, ...]:
        return tuple(map(parse_rule, self.rules))


class Grid(Strict):
    """Every combination of some values, filled into patterns of a config's fields."""

    grid: dict[str, list[str | bool | int | float]]
    name: str
    rules: tuple[str, ...] = ()
    policy: str | None = None
    threshold: str | float | None = None
    prefix_cache: str | bool | None = None
    block_cache: str | bool | None = None
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
    """A pattern, or whatever holds patterns, with the values in place."""
    if isinstance(pattern, str):
        return PLACEHOLDER.sub(lambda found: str(values[found[1]]), pattern)
    if isinstance(pattern, dict):
        return {name: _filled(each, values) for name, each in pattern.items()}
    return tuple(_filled(each, values) for each in pattern) if isinstance(pattern, tuple) else pattern


class DecodingSpec(WithPolicy):
    """How every config is decoded that does not say otherwise. What is None follows from the model."""

    policy: str = DEFAULT_POLICY
    block_size: int | None = Field(default=None, ge=1, le=MOST_BLOCK_ROWS)
    sub_block_size: int | None = Field(default=None, ge=1, le=MOST_BLOCK_ROWS)
    mask_id: int | None = Field(default=None, ge=0)
    prefix_cache: bool = DecodingSettings.prefix_cache
    block_cache: bool = DecodingSettings.block_cache
    join: Join = "none"  # nothing that a run does is left to a timing
    max_new_tokens: int = Field(default=NEW_TOKENS, ge=1, le=MOST_COUNT)  # where a task sets no limit


class Resources(Strict):
    """What a job on a cluster asks for."""

    partition: str | None = None
    account: str | None = None
    gres: str | None = None
    cpus: int = Field(default=2, ge=1, le=MOST_COUNT)
    memory_gb: int = Field(default=16, ge=1, le=MOST_COUNT)
    minutes: int = Field(default=240, ge=1, le=MOST_COUNT)
    slurm: dict[str, str | bool | int] = Field(default_factory=dict)  # any other option of sbatch; true: no value

    @field_validator("slurm")
    @classmethod
    def _is_free(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if name in OWN_SBATCH_OPTIONS:
                raise ValueError(f"{name} is set by {OWN_SBATCH_OPTIONS[name]}")
            if not SBATCH_OPTION.fullmatch(name) or value is False or "\n" in str(value):
                raise ValueError(f"{name}={value!r} is no option of sbatch such as qos=long")
        return options


class ExperimentSpec(Strict):
    question: str
    tasks: tuple[str, ...] = Field(min_length=1)
    configs: Grid | list[ConfigSpec]
    baseline: str
    success: Success
    model: str = "embedded"
    batch_size: int = Field(default=32, ge=1, le=MOST_COUNT)
    batch_size_elsewhere: int = Field(
        default=BATCH_SIZE, ge=1, le=MOST_COUNT
    )  # with another model than the experiment's own
    chunk_samples: int = Field(default=32, ge=1, le=MOST_COUNT)
    dtype: str = "auto"
    weights: Weights = WEIGHTS
    device: str = "auto"
    num_fewshot: int | dict[str, int] | None = None  # examples in a prompt, or by task; None: the task's own
    metric: str | dict[str, str] | None = None  # what counts as accuracy, or by task; None: the declared one
    max_new_tokens: int | None = Field(default=None, ge=1, le=MOST_COUNT)  # instead of every task's own limit
    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    estimator: Estimator = "trajectory"
    data_dir: Path | None = None
    decoding: DecodingSpec = DecodingSpec()
    resources: Resources = Resources()


@dataclass(frozen=True)
class Experiment:
    folder: Path
    spec: ExperimentSpec
    configs: tuple[ConfigSpec, ...]
    remarks: tuple[str, ...]  # what is allowed and worth knowing
    given: dict[str, Any] = field(
        default_factory=dict
    )  # what a command line changed of the file, as the audit reads it

    @property
    def name(self) -> str:
        return self.folder.name

    def config(self, name: str) -> ConfigSpec:
        found = next((config for config in self.configs if config.name == name), None)
        if found is None:
            raise unknown_name(f"config of {self.name}", name, [config.name for config in self.configs])
        return found

    @property
    def baselines(self) -> tuple[str, ...]:
        """The experiment's own first; none of them is compared with another."""
        return tuple(dict.fromkeys([self.spec.baseline, *(each.baseline for each in self.configs if each.baseline)]))

    def baseline_of(self, name: str) -> str:
        """What a config is compared with; a baseline with itself."""
        return name if name in self.baselines else self.config(name).baseline or self.spec.baseline

    def success_of(self, name: str) -> Success:
        return self.config(name).success or self.config(self.baseline_of(name)).success or self.spec.success


def read_experiment(folder: Path, *, layers: int | None = None) -> Experiment:
    """Reads and checks an experiment; `layers` of the model, if known, lets layer groups be compared too."""
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
        remarks = _check(spec, configs, layers)
    except _AtPlace as error:
        raise UsageError(f"{path} line {_line(text, error.place)}: {error}") from None
    return Experiment(folder, spec, configs, remarks)


class UniqueKeys(yaml.SafeLoader):
    """YAML in which no key stands twice: of two the first would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {shown(key.value)} stands there twice")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _AtPlace(UsageError):
    """A mistake, and the keys that lead to it."""

    def __init__(self, place: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.place = place


@contextmanager
def _at(*place: str | int) -> Iterator[None]:
    """Gives what is wrong in here its place in the file."""
    try:
        yield
    except UsageError as error:
        raise _AtPlace(place, str(error)) from None


def _check(spec: ExperimentSpec, configs: tuple[ConfigSpec, ...], layers: int | None) -> tuple[str, ...]:
    is_grid = isinstance(spec.configs, Grid)
    names = [config.name for config in configs]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = ("configs", "name") if is_grid else ("configs", index)
            raise _AtPlace(place, f"config {name} stands there twice")
    if spec.baseline not in names:
        raise _AtPlace(("baseline",), f"baseline {shown(spec.baseline)} is no config; there are {', '.join(names)}")
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
        raise _AtPlace(("configs", "grid"), f"the grid compares layer groups of unequal size: {sizes}")
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
    """The layers that a config's rules choose, if the depth is known; whatever is wrong with it is said here."""
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


def _located(path: Path, text: str, error: ValidationError) -> UsageError:
    """The first complaint that is not about the other form that configs could have had."""
    content = yaml.safe_load(text)
    is_grid = isinstance(content, dict) and isinstance(content.get("configs"), dict)
    wrong_form = "list[ConfigSpec]" if is_grid else "Grid"
    complaints = [each for each in error.errors() if wrong_form not in map(str, each["loc"])]
    complaints.sort(key=lambda each: each["type"] != "extra_forbidden")  # a mistyped key is also a missing one
    first = (complaints or error.errors())[0]
    place = tuple(each for each in first["loc"] if each not in ("Grid", "list[ConfigSpec]"))
    message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return UsageError(f"{path} line {_line(text, place)}: {'.'.join(map(str, place)) or 'the file'}: {message}")


def _line(text: str, place: tuple[Any, ...]) -> int:
    """The line of the innermost node that the place still leads to."""
    node = yaml.compose(text)
    line = 1
    for key in place:
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
