"""The markers around figures in Markdown, and filling in the figures.

In a line, or as a table (each line of a table's marker is a reference, then what its row is called):

    Measured <!--= 02_trim/mini_gsm8k/window_block speed_up-->1.28x<!--/--> on word problems.

    <!-- figures accuracy, drop_interval, speed_up_interval
    02_trim/mini_gsm8k/baseline      no reuse
    02_trim/mini_gsm8k/window_*
    -->
    (the table)
    <!-- /figures -->
"""

import re
from collections.abc import Callable, Iterator

from stepsaver.engine.errors import UsageError
from stepsaver.report.markdown.wrapping import wrap

CODE = r"(?P<code>^```.*?^```|`[^`\n]+`)"
INLINE = r"<!--=(?P<value_of>.*?)-->.*?<!--/-->"
TABLE = r"<!-- figures(?P<table_of>.*?)-->\n.*?<!-- /figures -->"
MARKERS = re.compile(f"{CODE}|{INLINE}|{TABLE}", re.DOTALL | re.MULTILINE)
OPENING = re.compile(r"<!--=|<!-- figures")

ValueOf = Callable[[str], str]  # the content of an opening marker -> what belongs after it


def fill(text: str, value_of: ValueOf, table_of: ValueOf) -> str:
    """Returns the text with every figure as it is now. Paragraphs in which one has changed are wrapped again."""
    found = list(MARKERS.finditer(text))
    expected = len(OPENING.findall(MARKERS.sub(lambda match: "" if match["code"] else match[0], text)))
    if expected != sum(match["code"] is None for match in found):
        raise UsageError("a marker of figures is not closed by <!--/--> or <!-- /figures -->")

    def replaced(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match[0]
        if match["value_of"] is not None:
            return f"<!--={match['value_of']}-->{value_of(match['value_of'])}<!--/-->"
        return f"<!-- figures{match['table_of']}-->\n{table_of(match['table_of'])}\n<!-- /figures -->"

    return "\n\n".join(_rewrapped(text, MARKERS.sub(replaced, text)))


def _rewrapped(before: str, after: str) -> Iterator[str]:
    """Yields the paragraphs. A figure has no empty line, so there are as many before as after."""
    for old, new in zip(before.split("\n\n"), after.split("\n\n"), strict=True):
        yield new if old == new else wrap(new)


def table_lines(marker: str) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Returns the fields of a table's marker, and its rows: a reference and what the row is called, if anything."""
    head, *lines = marker.strip().splitlines()
    fields = tuple(each.strip() for each in head.split(",") if each.strip())
    rows = [line.strip().partition(" ") for line in lines if line.strip()]
    if not fields or not rows:
        raise UsageError(f"a table of figures needs fields and rows, not {marker.strip()!r}")
    return fields, [(reference, name.strip()) for reference, _, name in rows]


def put_between(text: str, begin: str, end: str, content: str) -> str | None:
    """Returns the text with other content between two marks; None if it does not have them."""
    if begin not in text or end not in text:
        return None
    marked = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return marked.sub(lambda _: f"{begin}\n{content}\n{end}", text, count=1)
