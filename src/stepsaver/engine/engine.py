"""The one way in: a model, a decode policy, reuse rules and a batch size; prompts in, finished samples out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from stepsaver.engine.cache import DeltaCache, KeyValueCache
from stepsaver.engine.decode.policy import DecodePolicy
from stepsaver.engine.decode.threshold import Threshold
from stepsaver.engine.decoder import Decoder, StepEvent
from stepsaver.engine.decoding import Decoding, resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory
from stepsaver.engine.generate import decode
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.reuse.rule import ReuseRule, check_rules
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.state import Finish, Request, request_key
from stepsaver.engine.trace import SampleStep, Trace


@dataclass(frozen=True)
class Prompt:
    """Token ids; an identity, if the sample's random numbers shall depend on it; a limit of its own, if it has one."""

    ids: tuple[int, ...]
    identity: str | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """A finished sample: `index` counts the prompts, `ids` are the generated tokens with the stop token."""

    index: int
    ids: list[int]
    finish: Finish
    steps: list[SampleStep]


class Engine:
    """Decodes prompts with one model and one configuration. Keeps no state between calls.

    `reuse` rules are applied left to right. `checked` proves before each step that nothing stale is read.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        decode: DecodePolicy | None = None,
        reuse: tuple[ReuseRule, ...] = (),
        max_batch: int = 1,
        decoding: Decoding | None = None,
        checked: bool = False,
    ) -> None:
        if max_batch < 1:
            raise UsageError(f"batch size {max_batch} is not positive")
        self.model = model
        self.policy = decode or Threshold()
        self.rules = reuse
        self.max_batch = max_batch
        self.decoding = decoding or resolve_decoding(model.config)
        self.checked = checked
        check_rules(reuse, self.decoding, model.config.layers)

    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        trace: Trace | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        finished: Callable[[list[int]], bool] | None = None,
    ) -> Iterator[Completion]:
        """Yields finished samples as they finish.

        `on_step` is called for every denoising step of every sample; `finished` is asked after each block with the
        tokens so far and may end the sample; `trace` is filled with a record per forward.
        """
        requests = [self._request(place, prompt, max_new_tokens) for place, prompt in enumerate(prompts)]
        return self._decode(
            requests, sampling or Sampling(), trace if trace is not None else Trace(), on_step, finished
        )

    def _decode(
        self,
        requests: list[Request],
        sampling: Sampling,
        trace: Trace,
        on_step: Callable[[StepEvent], None] | None,
        finished: Callable[[list[int]], bool] | None,
    ) -> Iterator[Completion]:
        if not requests:
            return
        slots = min(self.max_batch, len(requests))
        memory = self._memory(slots, max(request.end for request in requests))
        trace.places = slots
        trace.cache_bytes = memory.cache.bytes + (memory.deltas.bytes if memory.deltas else 0)
        decoder = Decoder(
            self.model, memory, self.decoding, self.policy, self.rules, sampling, slots, self.checked, on_step, finished
        )
        for sample in decode(decoder, requests, trace):
            assert sample.ending is not None
            yield Completion(sample.index, sample.generated, sample.ending.finish, sample.steps)

    def _memory(self, slots: int, positions: int) -> Memory:
        """Caches for `slots` samples of that many positions, in whole blocks."""
        model, size = self.model, self.decoding.block_size
        capacity = (positions + size - 1) // size * size
        cache = KeyValueCache(model.config, slots=slots, capacity=capacity, dtype=model.dtype, device=model.device)
        layers = model.config.layers
        probed = frozenset[int]().union(*(rule.probe_layers(layers) for rule in self.rules))
        kept = probed.union(*(rule.delta_layers(layers) for rule in self.rules))
        deltas = None
        if kept:
            deltas = DeltaCache(
                model.config, layers=kept, slots=slots, block_size=size, dtype=model.dtype, device=model.device
            )
        return Memory(cache, deltas, model.rotations(capacity), probed)

    def _request(self, place: int, prompt: Prompt | Sequence[int], max_new_tokens: int) -> Request:
        given = prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))
        limit = max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
        ids = check_prompt(given, self.model.config, self.decoding, limit, f"prompt {place}")
        return Request(ids, limit, request_key(ids, given.identity))


def check_prompt(
    prompt: Prompt, config: ModelConfig, decoding: Decoding, max_new_tokens: int, place: str
) -> tuple[int, ...]:
    """The prompt's ids if the model can take them. An empty prompt stands for the bos token."""
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens {max_new_tokens} is negative")
    ids = prompt.ids
    if not ids:
        if decoding.bos_id is None:
            raise UsageError(f"{place} is empty, which stands for the bos token, and this model has none")
        ids = (decoding.bos_id,)
    outside = next((token for token in ids if not 0 <= token < config.vocab), None)
    if outside is not None:
        raise UsageError(f"{place}: id {outside} is outside the vocabulary of {config.vocab}")
    if len(ids) + max_new_tokens > config.max_positions:
        raise UsageError(
            f"{place}: {len(ids)} tokens and {max_new_tokens} new ones exceed "
            f"the model's {config.max_positions} positions"
        )
    return ids


def choose_device(name: str) -> torch.device:
    """`auto`: the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is unknown; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} is not available on this machine")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA from compute capability 8.0, float16 on older CUDA, float32 elsewhere."""
    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in known:
            raise UsageError(f"dtype {name!r} is unknown; allowed: auto, {', '.join(known)}")
        return known[name]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
