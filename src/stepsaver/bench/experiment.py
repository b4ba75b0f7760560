"""What an experiment asks, compares and is run with: the content of `experiment.yaml`, field by field."""

import itertools
import re
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator

from stepsaver.engine.arguments import MOST
from stepsaver.engine.decoders.chosen import chosen_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import (
    BATCH_SIZE,
    COMPILE,
    DECODE,
    DEFAULT_POLICY,
    NEW_TOKENS,
    WEIGHTS,
    Compile,
    Estimator,
    Weights,
)
from stepsaver.engine.errors import UsageError, shown, unknown_name
from stepsaver.engine.policies.policy import policy_text
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.evaluation.recipe import BatchSize, BlockSize, JoinInYaml, argument

CONDITION = re.compile(r"([<>])\s*(-?\d+(?:\.\d+)?)")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Condition(Strict):
    """A bound on a number, written `> 1.2`: its whole interval has to meet it."""

    sign: Literal["<", ">"]
    bound: float

    @classmethod
    def parse(cls, text: object) -> "Condition":
        match = CONDITION.fullmatch(text.strip()) if isinstance(text, str) else None
        if not match or not isfinite(float(match[2])):
            raise ValueError(f"{shown(text)} is no condition such as '> 1.2'")
        return cls(sign="<" if match[1] == "<" else ">", bound=float(match[2]))

    @model_serializer
    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


class Criterion(Strict):
    """Bounds on the speed-up against the baseline and on the drop of accuracy in points."""

    speed_up: Condition
    """Times the baseline's, by tokens per second or by seconds per sample, whichever is smaller."""
    drop_points: Condition
    """Points of accuracy that are lost against the baseline on the same samples."""

    @field_validator("speed_up", "drop_points", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return value if isinstance(value, Condition) else Condition.parse(value)


class Success(Strict):
    """A config confirms if it meets both bounds of `confirm_if`; it is rejected if it meets either of `reject_if`."""

    confirm_if: Criterion
    """Bounds that both have to hold."""
    reject_if: Criterion
    """Bounds of which one has to hold."""


MOST_CONFIGS, MOST_NAME = 1000, 100
CHUNK_BATCHES = 2  # at least
REFERENCE = "autoregressive"  # the decoder that every experiment is shown beside
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
    """One named combination of decoder, rules, policy and caches; what it leaves out comes from the experiment.

    `baseline` names another config to compare it with than the experiment's baseline. It may have success criteria of
    its own; those of a baseline hold for the configs that are compared with it and have none.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=MOST_NAME)
    """Also of its folder among the results."""
    decode: str | None = None
    """Instead of the experiment's."""
    rules: tuple[str, ...] = ()
    """Reuse rules, applied from left to right (`stepsaver list rules`)."""
    policy: str | None = None
    """Instead of the experiment's; `threshold: 0.95` is short for one."""
    prefix_cache: bool | None = None
    """Instead of the experiment's."""
    block_cache: bool | None = None
    """Instead of the experiment's."""
    sub_block_size: BlockSize | None = None
    """Instead of the experiment's."""
    join: JoinInYaml | None = None
    """Instead of the experiment's."""
    baseline: str | None = None
    """The config that it is compared with, if that is another than the experiment's baseline."""
    success: Success | None = None
    """Instead of the experiment's."""
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Of the experiment's tasks, those that it is run on; all of them if left out."""

    @property
    def settings(self) -> tuple[str, ...]:
        """What tells its decoding from the experiment's, as texts."""
        return (*filter(None, [self.decode]), *self.rules, *filter(None, [self.policy]))

    def parsed_rules(self) -> tuple[Rule, ...]:
        return tuple(map(parse_rule, self.rules))

    def decoder(self, decoding: "DecodingSpec") -> Decoder:
        """Returns its decoder. The experiment's policy is for block diffusion only."""
        decode = self.decode or decoding.decode
        policy = decoding.policy if self.policy is None and decode == DECODE else self.policy
        return chosen_decoder(decode, policy=policy, rules=self.rules)


class Grid(Strict):
    """A config for every combination of some values, which are filled into patterns of its fields."""

    grid: dict[str, list[str | bool | int | float]]
    """The values of each name that the patterns use, as in `k{k}_{layers}`."""
    name: str
    decode: str | None = None
    rules: tuple[str, ...] = ()
    policy: str | None = None
    threshold: str | float | None = None
    prefix_cache: str | bool | None = None
    block_cache: str | bool | None = None
    sub_block_size: str | int | None = None
    join: str | bool | None = None
    beside: list[ConfigSpec] = []
    """Configs that are of no combination."""

    def configs(self) -> list[ConfigSpec]:
        count = prod(map(len, self.grid.values()))
        if count > MOST_CONFIGS:
            raise ValueError(f"the grid has {count} combinations; {MOST_CONFIGS} are allowed")
        patterns = self.model_dump(exclude={"grid", "beside"}, exclude_none=True)
        combinations = itertools.product(*self.grid.values())
        try:
            combined = [
                ConfigSpec.model_validate(_filled(patterns, dict(zip(self.grid, values, strict=True))))
                for values in combinations
            ]
        except KeyError as missing:
            raise ValueError(f"the pattern uses {missing}, which the grid does not have") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {shown(first['input'])}: {first['msg']}") from None
        return [*combined, *self.beside]


def _filled(pattern: Any, values: dict[str, Any]) -> Any:
    """Returns a pattern, or a dict or tuple of patterns, with the values filled in."""
    if isinstance(pattern, str):
        return PLACEHOLDER.sub(lambda found: str(values[found[1]]), pattern)
    if isinstance(pattern, dict):
        return {name: _filled(each, values) for name, each in pattern.items()}
    return tuple(_filled(each, values) for each in pattern) if isinstance(pattern, tuple) else pattern


# Options of sbatch that the runner sets itself, and where each comes from.
OWN_SBATCH_OPTIONS = {
    "partition": "`partition`", "account": "`account`", "gres": "`gres`", "cpus-per-task": "`cpus`",
    "mem": "`memory_gb`", "time": "`minutes`", "array": "the number of shards", "job-name": "the experiment's name",
    "output": "the folder of logs", "error": "the folder of logs", "requeue": "the runner", "no-requeue": "the runner",
    "signal": "the runner", "open-mode": "the runner",
}  # fmt: skip
SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*")


class DecodingSpec(WithPolicy):
    """How configs are decoded, unless they say otherwise."""

    decode: str = DECODE
    """The decoder (`stepsaver list decoders`)."""
    policy: str = DEFAULT_POLICY
    """Of configs that are decoded in blocks (`stepsaver list policies`); `threshold: 0.95` is short for one."""
    block_size: BlockSize | None = None
    """Positions decoded together; the model's own if left out."""
    sub_block_size: BlockSize | None = None
    """Positions of a block decoded before the next ones; the model's own if left out."""
    mask_id: Annotated[int, argument("mask_id")] | None = None
    """The mask token; the model's own if left out."""
    prefix_cache: bool = DecodingSettings.prefix_cache
    """Whether keys and values of finished blocks are kept."""
    block_cache: bool = DecodingSettings.block_cache
    """Whether those of the block that is being decoded are."""
    join: JoinInYaml = "off"
    """Whether prefills and commits share a forward with steps; `auto` decides by the measured cost of a forward."""
    max_new_tokens: int = Field(default=NEW_TOKENS, ge=1, le=MOST)
    """Of an answer where its task sets no limit."""


class Resources(Strict):
    """What a job on a cluster asks for."""

    partition: str | None = None
    """Of the cluster."""
    account: str | None = None
    """That is charged."""
    gres: str | None = None
    """Devices, such as `gpu:1`."""
    cpus: int = Field(default=2, ge=1, le=MOST)
    """For each job."""
    memory_gb: int = Field(default=16, ge=1, le=MOST)
    """For each job."""
    minutes: int = Field(default=240, ge=1, le=MOST)
    """After which a job is put back into the queue."""
    slurm: dict[str, str | bool | int] = Field(default_factory=dict)
    """Other options of sbatch by their names; `true` for one without a value."""

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
    """The content of `experiment.yaml`."""

    question: str
    """What is to be found out."""
    tasks: tuple[str, ...] = Field(min_length=1)
    """What is decoded or scored (`stepsaver list tasks`)."""
    configs: Grid | list[ConfigSpec]
    """What is compared: a list, or a grid of all combinations of some values."""
    baseline: str
    """The config that the others are compared with."""
    success: Success
    """When the hypothesis is confirmed, and when it is rejected."""
    model: str = "embedded"
    """A folder, a hub id, or `embedded`."""
    batch_size: BatchSize = 32
    """Samples decoded together."""
    batch_size_elsewhere: BatchSize = BATCH_SIZE
    """The same with another model than the experiment's own (`run --model`)."""
    chunk_samples: int | None = Field(default=None, ge=1, le=MOST)
    """Samples that are run, timed beside the baseline and stored together; two batches at least, and if left out."""
    dtype: str = "auto"
    """float32, float64, bfloat16 or float16; `auto` is what suits the device."""
    weights: Weights = WEIGHTS
    """How weights are kept on a CPU; `auto` is in 16 bits where float16 holds them."""
    compile: Compile = COMPILE
    """Functions that torch compiles for a GPU; `auto` is where doctor has found them equal on the card."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ..."""
    num_fewshot: int | dict[str, int] | None = None
    """Examples in a prompt, of all tasks or by task; the task's own if left out."""
    metric: str | dict[str, str] | None = None
    """What counts as accuracy, of all tasks or by task; as declared if left out."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=MOST)
    """Of every answer, instead of its task's own limit."""
    seed: Annotated[int, argument("seed")] = 0
    """Of sampling."""
    estimator: Estimator | dict[str, Estimator] = "trajectory"
    """How scored tasks compute log-likelihoods, all of them or by task; autoregressive decoding has its own."""
    data_dir: Path | None = None
    """Local files instead of the hub."""
    decoding: DecodingSpec = DecodingSpec()
    """How configs are decoded, unless they say otherwise."""
    resources: Resources = Resources()
    """What a job on a cluster asks for."""

    def of_task(self, name: str, task: str) -> Any:
        """Returns a setting that all tasks share, or that stands there by task; None if this one is not named."""
        value = getattr(self, name)
        return value.get(task) if isinstance(value, dict) else value

    def estimator_of(self, task: str) -> Estimator:
        return self.of_task("estimator", task) or "trajectory"

    def chunk_of(self, batch_size: int) -> int:
        """Returns the samples of a chunk: a smaller one than two batches would measure slots that are empty."""
        return max(self.chunk_samples or 0, CHUNK_BATCHES * batch_size)


@dataclass(frozen=True)
class Experiment:
    folder: Path
    spec: ExperimentSpec
    configs: tuple[ConfigSpec, ...]
    remarks: tuple[str, ...]  # on what is allowed, but worth knowing
    given: dict[str, Any] = field(default_factory=dict)  # what the command line changed in the file, for the audit
    text: str | None = None  # of the file when it was read

    @property
    def name(self) -> str:
        return self.folder.name

    def config(self, name: str) -> ConfigSpec:
        found = next((config for config in self.configs if config.name == name), None)
        if found is None:
            raise unknown_name(f"config of {self.name}", name, [config.name for config in self.configs])
        return found

    def configs_on(self, folder: str) -> tuple[ConfigSpec, ...]:
        """Returns the configs that are run on a task, by its name or the folder of its results."""
        task = folder.rpartition("_limit_")[0] or folder
        return tuple(each for each in self.configs if each.tasks is None or {task, folder} & {*each.tasks})

    @property
    def baselines(self) -> tuple[str, ...]:
        """All baselines, the experiment's own first; none of them is compared with another."""
        return tuple(dict.fromkeys([self.spec.baseline, *(each.baseline for each in self.configs if each.baseline)]))

    @property
    def reference(self) -> str | None:
        """The config that every row also shows its speed-up over: the first that decodes autoregressively."""
        return next((each.name for each in self.configs if self._is_autoregressive(each)), None)

    def is_reference(self, name: str) -> bool:
        """Whether a config is shown and never judged: it decodes autoregressively, and is no baseline."""
        return name not in self.baselines and self._is_autoregressive(self.config(name))

    def _is_autoregressive(self, config: ConfigSpec) -> bool:
        return (config.decode or self.spec.decoding.decode).partition(":")[0] == REFERENCE

    def timed_beside(self, name: str) -> tuple[str, ...]:
        """Returns the configs that are timed wherever one is: its baseline, and the reference."""
        return tuple(dict.fromkeys(filter(None, [self.baseline_of(name), self.reference])))

    def estimator_of(self, config: ConfigSpec, task: str) -> Estimator:
        """Returns how a config is scored: autoregressive decoding by the likelihood that it writes the text itself."""
        return "trajectory" if self._is_autoregressive(config) else self.spec.estimator_of(task)

    def baseline_of(self, name: str) -> str:
        """Returns the name of what a config is compared with; a baseline is compared with itself."""
        return name if name in self.baselines else self.config(name).baseline or self.spec.baseline

    def success_of(self, name: str) -> Success:
        """Returns the criteria of a config, else of its baseline, else of the experiment."""
        return self.config(name).success or self.config(self.baseline_of(name)).success or self.spec.success
