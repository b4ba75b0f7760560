"""Bars of what each kind of step took, a bar per config."""

from collections.abc import Sequence
from typing import Any

from stepsaver.report.figures import PlotlyFigure, layout, plain

COMPUTED_KINDS = ("prefill", "full", "sub", "commit")
COLOURS = {"prefill": "#7c8aa0", "full": "#4477cc", "sub": "#7fb0ee", "commit": "#a68a1b", "reused": "#2a9d7f"}
LABELS = {"full": "full steps", "sub": "sub-block steps", "commit": "commits"}

Bars = Sequence[tuple[str, dict[str, float]]]  # config, and its share per kind


def stacked_bars(bars: Bars, unit: str) -> PlotlyFigure:
    names = [plain(name) for name, _ in bars]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [shares[kind] for _, shares in bars],
            "name": LABELS.get(kind, kind),
            "marker": {"color": COLOURS[kind]},
            "hovertemplate": "%{y}, " + LABELS.get(kind, kind) + ": %{x:,.4~g} " + unit + "<extra></extra>",
        }
        for kind in _kinds(bars)
    ]
    axis = {"autorange": "reversed", "type": "category"}
    more = {"barmode": "stack", "bargap": 0.3, "yaxis": axis}
    return {"data": traces, "layout": layout(unit, "", **more), "height": 120 + 26 * len(bars)}


def stacked_axes(axes: Any, bars: Bars, unit: str) -> None:
    heights = range(len(bars))
    left = [0.0] * len(bars)
    for kind in _kinds(bars):
        widths = [shares[kind] for _, shares in bars]
        axes.barh(heights, widths, left=left, color=COLOURS[kind], label=LABELS.get(kind, kind))
        left = [one + other for one, other in zip(left, widths, strict=True)]
    axes.set_yticks(heights, [name for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize=7)


def _kinds(bars: Bars) -> list[str]:
    return list(bars[0][1]) if bars else []
