"""Verified drafts: the text of autoregressive decoding, several tokens a forward."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.tuned import tuned


@dataclass(frozen=True)
class Verified:
    """One forward drafts the next `span` rows, one causal forward over them keeps what it would have written itself.

    Source: S2D2 (arXiv 2603.25702), which routes between this and denoising; here every round is verified. With blocks
    of one row the same checkpoint is autoregressive, and `context=causal` gives that text, token for token: the cache
    holds what causal forwards computed and nothing else. With `context=block` finished blocks are committed as always,
    and rows are causal inside the current block alone, which is what some checkpoints were trained on.
    A draft ends with its block. `span=auto` is the longest that the acceptance so far and the cost of rows justify;
    `ahead` says whether a verification carries the draft of the next round in the same forward.
    """

    name: ClassVar[str] = "verified"

    span: int | Literal["auto"] = field(default=16, metadata=tuned(16, "auto", 8, is_ordered=False))
    context: Literal["causal", "block"] = field(default="causal", metadata=tuned("causal", "block", is_ordered=False))
    ahead: Literal["auto", "always", "never"] = field(
        default="auto", metadata=tuned("always", "never", is_ordered=False)
    )

    def __post_init__(self) -> None:
        if self.span != "auto" and self.span < 1:
            raise UsageError(f"policy verified: span {self.span} is not positive")

    def check(self, decoding: DecodingSettings) -> None:
        """Says what makes no sense for the way a model is decoded."""
        if not decoding.prediction.opens_blocks:
            raise UsageError("policy verified needs rows that predict the token after them, and here each its own")
        if decoding.block_size == 1:
            raise UsageError("policy verified drafts the rest of a block, and blocks of one row have none")
        if not (decoding.prefix_cache and decoding.block_cache):
            raise UsageError("policy verified keeps what it has verified in the caches, and they are off")
