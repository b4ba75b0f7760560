"""Stop strings: where a generated text ends. A block or a token may end in the middle of a stop string."""

from collections.abc import Sequence

from stepsaver.evaluation.tokenizer import TextTokenizer

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
