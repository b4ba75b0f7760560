"""The residual stream of a forward's rows. Callers need not know when a sublayer's delta is really added."""

from collections.abc import Callable

from torch import Tensor

from stepsaver.engine.backends.packed import RowSubset


class Stream:
    """Hidden states [N, D], and a residual that is pending: the next norm reads every row anyway, and adds it."""

    def __init__(self, h_ND: Tensor) -> None:
        self.h_ND = h_ND
        self.pending: Tensor | None = None

    def through(self, run: Callable[[Tensor, Tensor | None], Tensor], rows: RowSubset) -> Tensor:
        """What `run` makes of some rows. It begins with a norm; if it gets all rows, it adds what is pending."""
        if rows.indices is not None:
            return run(self.settled()[rows.indices], None)
        pending, self.pending = self.pending, None
        return run(self.h_ND, pending)

    def add(self, delta: Tensor, rows: RowSubset) -> None:
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
