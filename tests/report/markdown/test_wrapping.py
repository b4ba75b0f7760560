"""Wrapping changes where lines end and nothing else."""

import re

from hypothesis import given
from hypothesis import strategies as st

from stepsaver.report.markdown.wrapping import overlong_lines, visible, wrap

FIGURE = "<!--=e/t/c speed_up-->1.68x [1.62, 1.73]<!--/-->"
PLAIN = ("a", "word", "longer-word", "`code with blanks`", "[a link](docs/page.md)", "+3")
WORDS = st.sampled_from([*PLAIN, FIGURE, "-", "1.", "#", "|"])
PARAGRAPH = st.lists(WORDS, min_size=1, max_size=60).map(lambda words: " ".join(["Start", *words]))


@given(PARAGRAPH, st.sampled_from(["", "- ", "  - ", "12. "]), st.integers(20, 100))
def test_a_paragraph_keeps_its_words_and_fits(text: str, start: str, width: int) -> None:
    wrapped = wrap(start + text, width)
    assert wrapped.split() == (start + text).split()
    assert wrap(wrapped, width) == wrapped
    assert not [line for line in wrapped.split("\n")[1:] if re.match(r"\s*([-+*#|>]|\d+\.)(\s|$)", line)]
    for line in wrapped.split("\n"):
        assert visible(line) <= width or len(line.split()) > 1 or " " not in line.strip()


def test_tables_code_and_headings_stay() -> None:
    wide = "x " * 80
    for text in (f"| {wide} |", f"# {wide}", f"```\n{wide}\n```", f"    {wide}", f"<img alt='{wide}'>"):
        assert wrap(text) == text
        assert not overlong_lines(text)
    assert overlong_lines(f"fine\n{wide}") == [2]


def test_lists_keep_their_indent_and_the_blocks_around_them() -> None:
    item = "- " + "word " * 30
    text = f"Before:\n{item.strip()}\n- second\n\n  {'more ' * 30}\n| a | b |\nAfter."
    lines = wrap(text).split("\n")
    assert lines[0] == "Before:"
    assert lines[1].startswith("- word")
    assert lines[2].startswith("  word")
    assert "- second" in lines
    assert lines[-2:] == ["| a | b |", "After."]
    assert all(len(line) <= 100 for line in lines)
