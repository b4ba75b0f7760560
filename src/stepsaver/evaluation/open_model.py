"""The one way to open a model by its name. Reports what is wrong with it before any weight is read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from stepsaver.engine.backends.cpu.weights import check_weights, served_weights
from stepsaver.engine.backends.gpu.choice import check_compile
from stepsaver.engine.curve import Curve
from stepsaver.engine.decoders.chosen import chosen_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import DecodingSettings, resolve_decoding
from stepsaver.engine.defaults import COMPILE, WEIGHTS, Compile, Join, Weights
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.machine import choose_device, choose_dtype, leave_cores_to_others
from stepsaver.engine.models.adapter import DraftAdapter, read_adapter
from stepsaver.engine.models.architecture import architecture_named
from stepsaver.engine.models.config import ModelConfig, read_config
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.rules.rule import Rule, chosen_rules
from stepsaver.engine.sampling import NonFiniteLogits
from stepsaver.evaluation.model_source import read_mask_id, resolve_model
from stepsaver.evaluation.tokenizer import TextTokenizer


@dataclass(frozen=True)
class OpenModel:
    """A model whose configuration and decoding settings are known. Tokenizer and weights are loaded when needed."""

    name: str
    folder: Path
    config: ModelConfig
    decoding: DecodingSettings
    device: torch.device
    dtype: torch.dtype
    weights: Weights  # as served here
    compile: Compile = COMPILE

    @property
    def policy(self) -> str:
        """Of its architecture's own decoder: what holds if no policy is asked for."""
        return architecture_named(self.config.architecture).policy

    def decoder(
        self,
        decode: str | Decoder | None = None,
        *,
        policy: str | Policy | None = None,
        threshold: float | None = None,
        rules: str | Rule | Sequence[str | Rule] = (),
    ) -> Decoder:
        """The decoder that was asked for, by its text or its parts: a policy, a threshold and rules are of blocks. The
        rest is as the architecture's own decoder.
        """
        rules = chosen_rules(rules)
        if decode is None and policy is None and threshold is None and not rules:
            decode = architecture_named(self.config.architecture).decode
        return chosen_decoder(decode, policy=policy, threshold=threshold, rules=rules, default_policy=self.policy)

    def differences(self) -> str | None:
        """One line if blocks are decoded otherwise than by the model's own decoder: its texts are then others too."""
        try:
            own = resolve_decoding(self.config, mask_id=self.decoding.mask_id)
        except UsageError:  # no file says how large its blocks are
            return None
        fields = ("block_size", "sub_block_size", "block_cache")
        others = [name for name in fields if getattr(self.decoding, name) != getattr(own, name)]
        said = ", ".join(f"{name} {getattr(self.decoding, name)} (its own: {getattr(own, name)})" for name in others)
        return f"not as {self.config.architecture}'s own decoder: {said}" if others else None

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.folder)

    def load(self) -> Transformer:
        """The network with its weights."""
        leave_cores_to_others(self.device)
        return load_model(self.folder, dtype=self.dtype, device=self.device, weights=self.weights, compile=self.compile)

    def outline(self) -> Transformer:
        """The network without weights: good for planning and counting, but it cannot run."""
        with torch.device("meta"):
            return Transformer(self.config).to(self.dtype)

    def engine(
        self, decoder: Decoder, *, batch_size: int, curve: Curve | None = None, draft_adapter: Path | None = None
    ) -> Engine:
        """Checks the decoder and its adapter against the model, then loads it."""
        decoder.check(decoder.settled(self.decoding), self.config.layers)
        adapter = None if draft_adapter is None else self._adapter(decoder, draft_adapter)
        model = self.load()
        model.draft_adapter = adapter
        return Engine(model, decoder=decoder, batch_size=batch_size, decoding=self.decoding, curve=curve)

    def _adapter(self, decoder: Decoder, folder: Path) -> DraftAdapter:
        if not isinstance(decoder, Speculative):
            raise UsageError(f"a draft adapter is for speculative decoding, and {decoder.text} drafts nothing")
        if not self.decoding.prediction.opens_blocks:
            raise UsageError("a draft adapter needs causal positions that verify, and here masked copies do")
        return read_adapter(folder, self.config, dtype=self.dtype, device=self.device)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turns an error about logits that are not finite, the checkpoint's fault, into one line with its name."""
        try:
            yield
        except Exception as error:  # no name of ours: a stream that is open at the interpreter's end finds none
            if isinstance(error, NonFiniteLogits):
                raise UsageError(f"{self.name}: {error}") from None
            raise


def open_model(
    name: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    weights: Weights = WEIGHTS,
    compile: Compile = COMPILE,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    mask_id: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    prefix_cache: bool = DecodingSettings.prefix_cache,
    block_cache: bool = DecodingSettings.block_cache,
    join: Join = "auto",
) -> OpenModel:
    """Finds the folder and reads its configuration. None means the value of the checkpoint or the architecture."""
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    check_weights(weights, chosen_dtype, chosen_device)
    check_compile(compile, chosen_device)
    folder = resolve_model(name, revision=revision)
    config = read_config(folder)
    if mask_id is None and config.mask_id is None:
        mask_id = read_mask_id(folder)
    decoding = resolve_decoding(
        config,
        block_size=block_size,
        sub_block_size=sub_block_size,
        mask_id=mask_id,
        stop_ids=stop_ids,
        prefix_cache=prefix_cache,
        block_cache=block_cache,
        join=join,
    )
    served = served_weights(weights, chosen_dtype, chosen_device)
    return OpenModel(name, folder, config, decoding, chosen_device, chosen_dtype, served, compile)
