"""The figures of a task, one file each: drawn by plotly in the page and by matplotlib for a paper.

A file has `ORDER`, `TITLE`, `CAPTION`, `is_there(task)`, `for_page(task)` and `for_paper(task, axes)`. The colours of
the page's text, grid and background are set in the page, because they follow its theme.
"""

import html
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol, cast

from stepsaver.report.cells import ReportTask

# Okabe and Ito's colours, two of them darkened, told apart by most eyes on light and on dark ground
PALETTE = (
    "#4477cc", "#e08a1e", "#2a9d7f", "#c8476d", "#8a63c9", "#a68a1b", "#3a9fc4", "#b5651d", "#7c8aa0", "#6a9f3f",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "p", "h")

PlotlyFigure = dict[str, Any]


class Figure(Protocol):
    """What a file of this folder offers."""

    __name__: str
    ORDER: int
    TITLE: str
    CAPTION: str

    @staticmethod
    def is_there(task: ReportTask) -> bool: ...
    @staticmethod
    def for_page(task: ReportTask) -> PlotlyFigure: ...
    @staticmethod
    def for_paper(task: ReportTask, axes: Any) -> None: ...


def all_figures() -> list[Figure]:
    """Returns every file of this folder, in the order in which a reader sees them. One that lacks a name fails here."""
    found = [
        cast(Figure, import_module(f"{__name__}.{each.name}")) for each in iter_modules(__path__) if each.name[0] != "_"
    ]
    for each in found:
        lacking = [part for part in Figure.__annotations__ if not hasattr(each, part)]
        assert not lacking, f"{each.__name__} has no {', '.join(lacking)}"
    return sorted(found, key=lambda each: each.ORDER)


def figure_name(figure: Figure) -> str:
    return figure.__name__.rpartition(".")[2]


def plain(text: str) -> str:
    """Returns text for plotly, which reads tags in every text: they are written as entities."""
    return html.escape(text, quote=False)


def in_turn(values: Sequence[str], index: int) -> str:
    return values[index % len(values)]


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Returns the layout that the figures of the page share."""
    return {
        "xaxis": {"title": {"text": x}, "automargin": True} | more.pop("xaxis", {}),
        "yaxis": {"title": {"text": y}, "automargin": True} | more.pop("yaxis", {}),
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        **more,
    }
