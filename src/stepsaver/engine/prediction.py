"""What the logits of a row predict: the token after the row, or the row's own. Nothing else adds or subtracts one."""

from typing import Literal, NamedTuple

from stepsaver.engine.rows import Rows

Predicts = Literal["next", "self"]


class Prediction(NamedTuple):
    """A value of the architecture."""

    name: Predicts
    shift: int  # from a row to the row whose token it predicts

    def readers(self, rows: Rows) -> Rows:
        """The rows whose logits predict the tokens of these rows."""
        return rows >> self.shift

    def predicted(self, rows: Rows) -> Rows:
        """The rows whose tokens the logits of these rows predict; the first of the next block counts on."""
        return rows << self.shift

    @property
    def opens_blocks(self) -> bool:
        """Whether the context before a block predicts its first token, so that no block opens with masks alone."""
        return self.shift > 0


NEXT = Prediction("next", 1)
SELF = Prediction("self", 0)
PREDICTIONS: dict[Predicts, Prediction] = {"next": NEXT, "self": SELF}
