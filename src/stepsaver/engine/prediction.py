"""What the logits of a position predict: the next position's token, or its own. Only this module shifts by one.

`both`: a causal position predicts the next token, a masked one its own. There the context is causal, so a token's keys
and values never depend on what follows it, and blocks start right behind the prompt, with the token that it predicts.
"""

from typing import Literal, NamedTuple

from stepsaver.engine.positions import Positions

Predicts = Literal["next", "self", "both"]


class Prediction(NamedTuple):
    """Which token a position of a denoising step predicts. The architecture says which it is."""

    name: Predicts
    shift: int  # positions from a position to the one whose token it predicts

    @property
    def has_causal_context(self) -> bool:
        return self.name == "both"

    @property
    def of_context(self) -> "Prediction":
        """What positions of the context predict: of prefills and commits."""
        return NEXT if self.has_causal_context else self

    def readers(self, positions: Positions) -> Positions:
        """The positions whose logits predict the tokens of these positions."""
        return positions >> self.shift

    def predicted(self, positions: Positions) -> Positions:
        """The positions whose tokens these positions predict. The next block's first position is numbered after the
        block's last.
        """
        return positions << self.shift

    @property
    def opens_blocks(self) -> bool:
        """Whether the context before a block predicts its first token, so that no block starts with masks only."""
        return self.of_context.shift > 0


NEXT = Prediction("next", 1)
SELF = Prediction("self", 0)
BOTH = Prediction("both", 0)
PREDICTIONS: dict[Predicts, Prediction] = {each.name: each for each in (NEXT, SELF, BOTH)}
