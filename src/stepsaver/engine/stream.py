"""The residual stream of a forward's rows. Callers need not know when a delta is really added."""

from collections.abc import Callable

from torch import Tensor

from stepsaver.engine.packing import Subset


class Stream:
    """Hidden states, and a delta that is still to be added to all of them: the next norm reads every row anyway."""

    def __init__(self, h_ND: Tensor) -> None:
        self.h_ND = h_ND
        self.pending: Tensor | None = None

    def through(self, part: Callable[..., Tensor], rows: Subset) -> Tensor:
        """A part's result for some rows. A part begins with a norm; if it gets all rows, it adds the pending delta."""
        if rows.indices is not None:
            return part(self.settled()[rows.indices])
        pending, self.pending = self.pending, None
        return part(self.h_ND, added=pending)

    def add(self, delta: Tensor, rows: Subset) -> None:
        self.settled()
        if rows.indices is None:
            self.pending = delta
        else:
            self.h_ND.index_add_(0, rows.indices, delta)

    def keep(self, indices: Tensor | None) -> None:
        """Drops all other rows; None keeps all."""
        if indices is not None:
            self.h_ND = self.settled()[indices]

    def settled(self) -> Tensor:
        """The hidden states with everything added."""
        if self.pending is not None:
            self.h_ND += self.pending
            self.pending = None
        return self.h_ND
