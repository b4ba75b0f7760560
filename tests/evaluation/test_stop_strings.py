"""Where a text ends: stop strings over blocks, tokens, characters and lines."""

import pytest

from stepsaver.evaluation.growing_text import StopStrings
from stepsaver.evaluation.tokenizer import TextTokenizer

BLOCK = 8


def _ends(tokenizer: TextTokenizer, strings: list[str], text: str, block: int = BLOCK) -> tuple[int, str]:
    """After how many tokens a block-wise decoder stops, and the text that is left."""
    stops = StopStrings(tokenizer, strings, block_size=block)
    ids = tokenizer.encode(text)
    for end in range(block, len(ids) + block, block):
        if stops.are_reached(ids[:end]):
            return min(end, len(ids)), stops.text(ids[:end])
    return len(ids), stops.text(ids)


@pytest.mark.parametrize(
    ("strings", "text", "kept", "tokens"),
    [
        (["Question:"], "The answer is 7.\n\nQuestion: next", "The answer is 7.\n\n", 32),
        (["Question:"], "12345Question:", "12345", 14),  # over the first two blocks
        (["\n\n"], "1234567\n\nmore text", "1234567", 16),  # one newline in either block
        (["。"], "1234567。afterwards", "1234567", 16),  # a character of three bytes, split after its first
        (["日本語の終わり"], "abc日本語の終わりdef", "abc", 24),  # longer than a block
        (["🙂"], "naïve 🙂 rest", "naïve ", 16),
        (["end", "END"], "one END two end", "one ", 8),  # the first occurrence, whichever string
        (["b", "ab"], "xxabyy", "xx", 6),
        (["<|end|>"], "text<|end|>behind it", "text", 8),  # one token
        (["absent"], "nothing stops here", "nothing stops here", 18),
        ([], "no stop strings", "no stop strings", 15),
        ([""], "an empty one stops nothing", "an empty one stops nothing", 26),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    byte_tokenizer: TextTokenizer, strings: list[str], text: str, kept: str, tokens: int
) -> None:
    assert _ends(byte_tokenizer, strings, text) == (tokens, kept)


@pytest.mark.parametrize("block", [1, 8, 32])
def test_a_stop_string_far_behind_is_found_in_the_block_that_completes_it(
    byte_tokenizer: TextTokenizer, block: int
) -> None:
    """The search looks at the end of the text only, and misses nothing, wherever the blocks fall."""
    for lead in range(3 * block):
        text = "x" * lead + "stop here" + "y" * 3 * block
        completed = lead + len("stop here")
        assert _ends(byte_tokenizer, ["stop here"], text, block) == (-(-completed // block) * block, "x" * lead)


def test_a_stop_string_interrupted_by_a_special_token_still_cuts(byte_tokenizer: TextTokenizer) -> None:
    stops = StopStrings(byte_tokenizer, ["abcd"], block_size=BLOCK)
    assert stops.text(byte_tokenizer.encode("xab<|user|>cdy")) == "x"
