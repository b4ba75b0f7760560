"""Text that grows with its tokens: where it ends, and what of it is settled. A token may end within a character."""

from collections.abc import Sequence

from stepsaver.evaluation.tokenizer import TextTokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character
SLACK_TOKENS = 8  # a character can be split over up to four tokens, at both ends of the window


class StopStrings:
    """Finds stop strings in tokens. A stop string that is one token, such as `<|im_end|>`, is also found as that token.

    While decoding, only the end of the text is searched, so the cost does not grow with the text. `text` searches
    everything and has the last word.
    """

    def __init__(self, tokenizer: TextTokenizer, strings: Sequence[str], *, block_size: int) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(string for string in strings if string)
        self._tokens = frozenset(i for string in self._strings if (i := tokenizer.added_token(string)) is not None)
        longest = max((len(string.encode()) for string in self._strings), default=0)
        self._window = block_size + longest + SLACK_TOKENS

    def are_reached(self, ids: Sequence[int]) -> bool:
        """Whether the last block completed a stop string. A token has at least one byte, which bounds the window."""
        window = ids[-self._window :]
        if not self._strings:
            return False
        if not self._tokens.isdisjoint(window):
            return True
        text = self._tokenizer.decode(window)
        return any(string in text for string in self._strings)

    def text(self, ids: Sequence[int]) -> str:
        """The text before the first stop string."""
        end = next((index for index, token in enumerate(ids) if token in self._tokens), len(ids))
        text = self._tokenizer.decode(ids[:end])
        ends = [end for string in self._strings if (end := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text


class SettlingText:
    """Text whose tokens arrive bit by bit. What was shown is never taken back: an incomplete character waits."""

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
