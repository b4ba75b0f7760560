"""Verified drafts: the text of autoregressive decoding, several tokens a forward."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.tuned import tuned


@dataclass(frozen=True)
class Verified:
    """One forward drafts the next `span` rows, one causal forward over them keeps what it would have written itself.

    Source: S2D2 (arXiv 2603.25702), which switches between this and denoising; here every round is verified. With
    blocks of one row the same checkpoint is autoregressive. `context=causal` gives that text, token for token: the
    cache holds only what causal forwards computed. With `context=block`, finished blocks are committed as usual, and
    rows are causal only inside the current block, as some checkpoints were trained.
    A draft ends with its block, and is verified up to the first token that ends the text. `span=auto` chooses the
    length that pays most, given the acceptance so far and the cost of rows. `ahead` says whether a verification also
    runs the next draft in the same forward.
    """

    name: ClassVar[str] = "verified"

    span: int | Literal["auto"] = field(default=16, metadata=tuned(16, 12, "auto", 8, is_ordered=False))
    context: Literal["causal", "block"] = field(default="causal", metadata=tuned("causal", "block", is_ordered=False))
    ahead: Literal["auto", "always", "never"] = field(
        default="auto", metadata=tuned("always", "never", is_ordered=False)
    )

    def __post_init__(self) -> None:
        if self.span != "auto" and self.span < 1:
            raise UsageError(f"policy verified: span {self.span} is not positive")

    def check(self, decoding: DecodingSettings) -> None:
        """Refuses decoding settings that this policy cannot work with."""
        if not decoding.prediction.opens_blocks:
            raise UsageError(
                "policy verified needs rows that predict the token after them, and here each predicts its own"
            )
        if decoding.block_size == 1:
            raise UsageError("policy verified drafts the rest of a block, and blocks of one row have none")
        if not (decoding.prefix_cache and decoding.block_cache):
            raise UsageError("policy verified keeps what it has verified in the caches, and they are off")
