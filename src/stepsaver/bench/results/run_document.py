"""`run.json`: what identifies a run, and where it began."""

from collections.abc import Sequence
from typing import Any

from stepsaver.bench.results.stored import Stored
from stepsaver.engine.prediction import Predicts


class DecodingIdentity(Stored):
    block_size: int
    sub_block_size: int
    mask_id: int
    stop_ids: Sequence[int]
    bos_id: int | None = None
    prefix_cache: bool
    block_cache: bool
    predicts: Predicts = "next"  # runs from before there were others do not say
    join: str = "none"


class Identity(Stored):
    """Everything that changes a run's numbers. Fields with a default were not written by every version."""

    plugins: dict[str, str] | None = None  # hashes of rules and policies that are not ours, where there are any
    model: str | None = None  # hash
    layers: int
    source: str | None = None  # hash
    libraries: dict[str, str] | None = None
    kernels: bool | None = None  # whether they were used
    weights: str | None = None
    rules: list[str]
    policy: str
    decoding: DecodingIdentity
    task: str
    metric: str | None = None
    num_fewshot: int | dict[str, int] | None = None
    data: str | None = None  # hash
    limit: int | None = None
    seed: int | None = None
    estimator: str | None = None
    max_new_tokens: int | None = None  # where a task sets no limit
    token_limit: int | None = None  # instead of every task's own
    dtype: str
    device: str | None = None
    batch_size: int | None = None
    chunk_samples: int | None = None


class Provenance(Stored):
    """Where a run began. Not part of its identity."""

    git: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    given: dict[str, Any] | None = None  # what the command line changed in the experiment's file


class RunDocument(Stored):
    run_id: str
    opened_by: str | None = None  # the label of the run whose first process opened it
    provenance: Provenance | None = None
    identity: Identity
    sum: str | None = None  # None: in the former format
