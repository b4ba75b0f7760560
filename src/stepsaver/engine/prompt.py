"""A prompt, and whether a model can take it."""

from dataclasses import dataclass

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.config import ModelConfig


@dataclass(frozen=True)
class Prompt:
    """Token ids; optionally an identity, which then determines the sample's random numbers, and a limit of its own."""

    ids: tuple[int, ...]
    identity: str | None = None
    max_new_tokens: int | None = None


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
