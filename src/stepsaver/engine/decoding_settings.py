"""How a model is decoded: the parameters in section "decoding" of every result, checked once; and what it decodes."""

from dataclasses import dataclass

from stepsaver.engine.defaults import JOINS, Join
from stepsaver.engine.errors import UsageError, shown, unknown_name
from stepsaver.engine.models.architecture import architecture_named
from stepsaver.engine.models.config import MOST_BLOCK_ROWS, ModelConfig
from stepsaver.engine.positions import PREDICTIONS, Prediction, Predicts


@dataclass(frozen=True)
class DecodingSettings:
    block_size: int
    sub_block_size: int
    mask_id: int
    stop_ids: tuple[int, ...]
    bos_id: int | None
    prefix_cache: bool = True
    block_cache: bool = True
    predicts: Predicts = "next"
    join: Join = "off"  # which steps share a forward; does not change the tokens

    @property
    def prediction(self) -> Prediction:
        return PREDICTIONS[self.predicts]


def resolve_decoding(
    config: ModelConfig,
    *,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    mask_id: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    prefix_cache: bool = DecodingSettings.prefix_cache,
    block_cache: bool = DecodingSettings.block_cache,
    join: Join = "auto",
) -> DecodingSettings:
    """Takes what the caller left open from the checkpoint's configuration and the architecture. Guesses nothing."""
    architecture = architecture_named(config.architecture)
    block = config.block_size if block_size is None else block_size
    if block is None:
        raise UsageError(
            f"neither config.json nor {config.architecture} says how many positions a block has; {_asked('block_size')}"
        )
    if not 1 <= block <= MOST_BLOCK_ROWS:
        raise UsageError(f"block size {shown(block)} is not from 1 to {MOST_BLOCK_ROWS}")
    sub_block = _usual_sub_block(block, architecture.sub_block_size) if sub_block_size is None else sub_block_size
    if sub_block < 1 or block % sub_block:
        raise UsageError(f"sub-block size {shown(sub_block)} does not divide the block size {block}")
    mask = next((i for i in (mask_id, config.mask_id, architecture.mask_id) if i is not None), None)
    if mask is None:
        if block > 1 or config.predicts == "self":
            raise UsageError(
                f"blocks of {block} positions need a mask token and this model names none; {_asked('mask_id')}"
            )
        mask = -1  # a block of one position, which predicts the next one, never holds a mask
    elif not 0 <= mask < config.vocab:
        raise UsageError(f"mask id {shown(mask)} is outside the vocabulary of {config.vocab}")
    stops = config.stop_ids if stop_ids is None else stop_ids
    for stop in stops:
        if not 0 <= stop < config.vocab:
            raise UsageError(f"stop id {shown(stop)} is outside the vocabulary of {config.vocab}")
    if join not in JOINS:
        raise unknown_name("join", join, JOINS)
    return DecodingSettings(
        block,
        sub_block,
        mask,
        tuple(stops),
        config.bos_id,
        prefix_cache,
        block_cache,
        config.predicts,
        join,
    )


def _usual_sub_block(block_size: int, usual: int | None) -> int:
    """The architecture's size, or the next smaller one that divides the block; without one, the whole block."""
    return next(size for size in range(min(usual or block_size, block_size), 0, -1) if block_size % size == 0)


def _asked(name: str) -> str:
    """How to set it: the command-line option, and the name in Python, `experiment.yaml` and lm-eval's arguments."""
    return f"set --{name.replace('_', '-')} ({name})"


@dataclass(frozen=True)
class Prompt:
    """Token ids; optionally an identity, which then determines the sample's random numbers, and a limit of its own."""

    ids: tuple[int, ...]
    identity: str | None = None
    max_new_tokens: int | None = None
    number: int = 0  # among several samples of the same prompt, which differ in their random numbers


def check_prompt(
    prompt: Prompt, config: ModelConfig, decoding: DecodingSettings, max_new_tokens: int, where: str
) -> tuple[int, ...]:
    """Returns the prompt's ids if the model can take them. An empty prompt becomes the bos token."""
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens {max_new_tokens} is negative")
    ids = prompt.ids
    if not ids:
        if decoding.bos_id is None:
            raise UsageError(f"{where} is empty, which stands for the bos token, and this model has none")
        ids = (decoding.bos_id,)
    outside = next((token for token in ids if not 0 <= token < config.vocab), None)
    if outside is not None:
        raise UsageError(f"{where}: id {outside} is outside the vocabulary of {config.vocab}")
    if len(ids) + max_new_tokens > config.max_positions:
        raise UsageError(
            f"{where}: {len(ids)} tokens and {max_new_tokens} new ones exceed "
            f"the model's {config.max_positions} positions"
        )
    return ids
