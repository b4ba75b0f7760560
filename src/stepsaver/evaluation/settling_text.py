"""Text that grows with its tokens: what is shown once is never taken back."""

from collections.abc import Sequence

from stepsaver.evaluation.tokenizer import TextTokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a character of which only some bytes are there


class SettlingText:
    """The text of tokens that come bit by bit. Characters that are not whole wait for the rest of their bytes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown = ""

    def settle(self, ids: Sequence[int], *, is_last: bool) -> str:
        """What the text of all tokens so far adds to what was returned before."""
        text = self._tokenizer.decode(ids)
        settled = text if is_last else text.rstrip(BROKEN)
        if not settled.startswith(self._shown):  # a decoder that rewrites what it wrote: wait until it agrees again
            return settled[len(self._shown) :] if is_last else ""
        added = settled[len(self._shown) :]
        self._shown = settled
        return added
