"""What the logits of a row predict: the next row's token, or the row's own. Only this module shifts rows by one."""

from typing import Literal, NamedTuple

from stepsaver.engine.rows import Rows

Predicts = Literal["next", "self"]


class Prediction(NamedTuple):
    """Which token a row predicts. The architecture says which of the two it is."""

    name: Predicts
    shift: int  # rows from a row to the one whose token it predicts

    def readers(self, rows: Rows) -> Rows:
        """The rows whose logits predict the tokens of these rows."""
        return rows >> self.shift

    def predicted(self, rows: Rows) -> Rows:
        """The rows whose tokens these rows predict. The next block's first row is numbered after the block's last."""
        return rows << self.shift

    @property
    def opens_blocks(self) -> bool:
        """Whether the context before a block predicts its first token, so that no block starts with masks only."""
        return self.shift > 0


NEXT = Prediction("next", 1)
SELF = Prediction("self", 0)
PREDICTIONS: dict[Predicts, Prediction] = {"next": NEXT, "self": SELF}
