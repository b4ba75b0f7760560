"""What a call tells of an answer beside its text: how it was decoded, and what rules left out."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stepsaver.engine.errors import UsageError
from stepsaver.engine.state import Finish


@dataclass(frozen=True)
class Answer:
    """An answer and how it was decoded. Prints as its text."""

    text: str
    ids: list[int]
    finish: Finish  # "stop": at a stop token or stop string; "length": at `max_new_tokens`
    forwards: int  # that it took part in
    positions_computed: float  # one that runs in half of the layers counts as half
    positions_saved: float  # that the same steps would have computed too without rules
    seconds: float  # of its forwards, which answers that are decoded together share
    confidences: list[float]  # how sure the model was of each token when it was written
    _page: Callable[[], str] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page that plays the decode step by step. Returns its path."""
        try:
            written = Path(path)
            written.write_text(self._page(), encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"no page can be written there: {error}") from None
        return written
