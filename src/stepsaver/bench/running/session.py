"""One process, one model: what all configs of a run share."""

import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stepsaver.bench.experiment.configs import OWN_DECODING, ConfigSpec
from stepsaver.bench.experiment.spec import Experiment
from stepsaver.bench.machine.measure_rows import measure_row_costs
from stepsaver.bench.results.identity import folder_hash
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Weights
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.row_costs import RowCosts
from stepsaver.evaluation.open_model import open_model
from stepsaver.evaluation.tokenizer import TextTokenizer


@dataclass(eq=False)
class Session:
    """A loaded model with its tokenizer. Timings of one session can be compared with each other."""

    identity: str
    model: Transformer
    folder: Path
    model_hash: str
    device: torch.device
    weights: Weights
    tokenizer: TextTokenizer
    decoding: DecodingSettings
    batch_size: int
    loading_seconds: float
    is_alone: bool = True  # on its machine, as far as this run knows, so that its timings can be compared
    name: str = ""  # of the model, as the user gave it
    row_costs: RowCosts | None = None  # of this machine, once measured; never if other shards share it

    @property
    def forward_rows(self) -> float | None:
        return self.row_costs.forward_rows if self.row_costs else None

    def measure_rows(self) -> RowCosts:
        """Returns the row costs of this machine, measured once, before the first chunk."""
        assert self.is_alone, "what is measured while others run says nothing about the machine"
        if self.row_costs is None:
            self.row_costs = measure_row_costs(self.model, decoding=self.decoding)
        return self.row_costs

    def engine(self, experiment: Experiment, config: ConfigSpec) -> Engine:
        policy = parse_policy(config.policy or experiment.spec.decoding.policy)
        own = {name: value for name in OWN_DECODING if (value := getattr(config, name)) is not None}
        decoding = replace(self.decoding, join=config.join or experiment.spec.decoding.join, **own)
        if decoding.block_size % decoding.sub_block_size:
            raise UsageError(
                f"config {config.name}: sub-block size {decoding.sub_block_size} does not divide the block size "
                f"{decoding.block_size}"
            )
        return Engine(
            self.model, policy=policy, rules=config.parsed_rules(), batch_size=self.batch_size, decoding=decoding
        )


def open_session(
    experiment: Experiment,
    *,
    model_name: str,
    has_weights: bool = True,
    is_alone: bool = True,
    loaded: Transformer | None = None,
) -> Session:
    """Loads the experiment's model or another one, unless it is `loaded`. Without weights it can plan but not run."""
    spec = experiment.spec
    opened = open_model(
        model_name,
        device=spec.device,
        dtype=spec.dtype,
        weights=spec.weights,
        block_size=spec.decoding.block_size,
        sub_block_size=spec.decoding.sub_block_size,
        mask_id=spec.decoding.mask_id,
        prefix_cache=spec.decoding.prefix_cache,
        block_cache=spec.decoding.block_cache,
        join=spec.decoding.join,
    )
    tokenizer = opened.tokenizer  # a folder without one is reported before the weights are read
    model_hash = folder_hash(opened.folder)
    started = time.perf_counter()
    model = loaded or (opened.load() if has_weights else opened.outline())
    loading = time.perf_counter() - started
    return Session(
        uuid.uuid4().hex[:12],
        model,
        opened.folder,
        model_hash,
        opened.device,
        opened.weights,
        tokenizer,
        opened.decoding,
        spec.batch_size if model_name == spec.model else spec.batch_size_elsewhere,
        loading,
        is_alone,
        model_name,
    )
