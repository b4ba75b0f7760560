"""What an experiment asks, compares and is run with."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from stepsaver.bench.experiment.conditions import Strict, Success
from stepsaver.bench.experiment.configs import ConfigSpec, Grid, WithPolicy
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import BATCH_SIZE, NEW_TOKENS, WEIGHTS, Weights
from stepsaver.engine.errors import unknown_name
from stepsaver.engine.estimators import Estimator
from stepsaver.engine.joins import Join
from stepsaver.engine.models.config import MOST_BLOCK_ROWS
from stepsaver.engine.policies.policy import DEFAULT_POLICY

# Options of sbatch that the runner sets itself, and where each comes from.
OWN_SBATCH_OPTIONS = {
    "partition": "`partition`", "account": "`account`", "gres": "`gres`", "cpus-per-task": "`cpus`",
    "mem": "`memory_gb`", "time": "`minutes`", "array": "the number of shards", "job-name": "the experiment's name",
    "output": "the folder of logs", "error": "the folder of logs", "requeue": "the runner", "no-requeue": "the runner",
    "signal": "the runner", "open-mode": "the runner",
}  # fmt: skip
SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*")
MOST_COUNT = 1 << 30


class DecodingSpec(WithPolicy):
    """How configs are decoded, unless they say otherwise. None stands for the model's own value."""

    policy: str = DEFAULT_POLICY
    block_size: int | None = Field(default=None, ge=1, le=MOST_BLOCK_ROWS)
    sub_block_size: int | None = Field(default=None, ge=1, le=MOST_BLOCK_ROWS)
    mask_id: int | None = Field(default=None, ge=0)
    prefix_cache: bool = DecodingSettings.prefix_cache
    block_cache: bool = DecodingSettings.block_cache
    join: Join = "none"  # so that no timing decides what a run does
    max_new_tokens: int = Field(default=NEW_TOKENS, ge=1, le=MOST_COUNT)  # where a task sets no limit


class Resources(Strict):
    """What a job on a cluster asks for."""

    partition: str | None = None
    account: str | None = None
    gres: str | None = None
    cpus: int = Field(default=2, ge=1, le=MOST_COUNT)
    memory_gb: int = Field(default=16, ge=1, le=MOST_COUNT)
    minutes: int = Field(default=240, ge=1, le=MOST_COUNT)
    slurm: dict[str, str | bool | int] = Field(default_factory=dict)  # other options of sbatch; true: without a value

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
    num_fewshot: int | dict[str, int] | None = None  # examples in a prompt, of all tasks or by task; None: the task's
    metric: str | dict[str, str] | None = None  # what counts as accuracy, of all tasks or by task; None: as declared
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
    remarks: tuple[str, ...]  # on what is allowed, but worth knowing
    given: dict[str, Any] = field(default_factory=dict)  # what the command line changed in the file, for the audit

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
        """All baselines, the experiment's own first; none of them is compared with another."""
        return tuple(dict.fromkeys([self.spec.baseline, *(each.baseline for each in self.configs if each.baseline)]))

    def baseline_of(self, name: str) -> str:
        """Returns the name of what a config is compared with; a baseline is compared with itself."""
        return name if name in self.baselines else self.config(name).baseline or self.spec.baseline

    def success_of(self, name: str) -> Success:
        """Returns the criteria of a config, else of its baseline, else of the experiment."""
        return self.config(name).success or self.config(self.baseline_of(name)).success or self.spec.success
