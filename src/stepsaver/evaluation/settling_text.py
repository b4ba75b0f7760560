"""Text that grows with its tokens. What was shown is never taken back."""

from collections.abc import Sequence

from stepsaver.evaluation.tokenizer import TextTokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character


class SettlingText:
    """The text of tokens that arrive bit by bit. An incomplete character waits for the rest of its bytes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown = ""

    def settle(self, ids: Sequence[int], *, is_last: bool) -> str:
        """The text of all tokens so far, without what was returned before."""
        text = self._tokenizer.decode(ids)
        settled = text if is_last else text.rstrip(BROKEN)
        if not settled.startswith(self._shown):  # the decoder rewrote earlier text: wait until it agrees again
            return settled[len(self._shown) :] if is_last else ""
        added = settled[len(self._shown) :]
        self._shown = settled
        return added
