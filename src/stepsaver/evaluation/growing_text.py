"""Text that grows with its tokens: where it ends, and what of it is settled. A token may end within a character."""

from collections.abc import Sequence
from dataclasses import replace

from stepsaver.engine.engine import Completion
from stepsaver.evaluation.encoding import checked_text
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
        self._strings = tuple(checked_text(string, "stop string") for string in strings if string)
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

    def ids(self, ids: list[int]) -> list[int]:
        """The ids up to the one that completes the first stop string."""
        if not self._tokens.isdisjoint(ids) or self.text(ids) != self._tokenizer.decode(ids):
            return ids[: next((count for count in range(1, len(ids)) if self.are_reached(ids[:count])), len(ids))]
        return ids

    def cut(self, completion: Completion) -> Completion:
        """The completion up to the token that completes the first stop string; `text` leaves that string out."""
        ids = self.ids(completion.ids)
        finish = completion.finish if len(ids) == len(completion.ids) else "stop"
        return replace(completion, ids=ids, finish=finish, confidences=completion.confidences[: len(ids)])

    def surely_before(self, text: str) -> str:
        """The text without an end that may become a stop string."""
        counts = range(len(text)) if any(text[-1:] in string for string in self._strings) else ()
        begun = (count for count in counts if any(string.startswith(text[count:]) for string in self._strings))
        return text[: next(begun, len(text))]


class SettlingText:
    """Text whose tokens arrive bit by bit. What was shown is never taken back: an incomplete character waits, and so
    does what may become a stop string.
    """

    def __init__(self, tokenizer: TextTokenizer, stops: StopStrings | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._shown = ""

    def settle(self, ids: Sequence[int], *, is_last: bool) -> str:
        """The text of all tokens so far, without what was returned before."""
        text = self._stops.text(ids) if self._stops else self._tokenizer.decode(ids)
        settled = text if is_last else text.rstrip(BROKEN)
        if self._stops and not is_last:
            settled = self._stops.surely_before(settled)
        if not settled.startswith(self._shown):  # the decoder rewrote earlier text: wait until it agrees again
            return settled[len(self._shown) :] if is_last else ""
        added = settled[len(self._shown) :]
        self._shown = settled
        return added
