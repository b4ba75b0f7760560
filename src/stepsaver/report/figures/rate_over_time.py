"""Throughput over time: a slow beginning or a disturbed machine shows here."""

from typing import Any

from stepsaver.report.cells import ReportTask
from stepsaver.report.figures import MARKERS, PALETTE, SYMBOLS, PlotlyFigure, in_turn, layout, plain

ORDER = 3
TITLE = "Throughput over time"
CAPTION = (
    "Tokens per second of each chunk, in the order in which a config's chunks ran. A cold start is a low first point."
)


def is_there(task: ReportTask) -> bool:
    return any(cell.details.rates for cell in task.done)


def for_page(task: ReportTask) -> PlotlyFigure:
    traces = [
        {
            "x": list(range(1, len(cell.details.rates) + 1)),
            "y": [rate for _, rate in cell.details.rates],
            "mode": "lines+markers",
            "line": {"width": 1.5, "color": in_turn(PALETTE, index)},
            "marker": {"size": 6, "symbol": in_turn(SYMBOLS, index)},
            "name": plain(cell.name),
            "text": [
                f"{plain(cell.name)}<br>{rate:.0f} tokens/s, {minutes:.1f} minutes after the first chunk"
                for minutes, rate in cell.details.rates
            ],
            "hoverinfo": "text",
        }
        for index, cell in enumerate(task.done)
    ]
    most = max(len(cell.details.rates) for cell in task.done)
    more = {"yaxis": {"rangemode": "tozero"}, "xaxis": {"dtick": max(1, most // 10)}}
    return {"data": traces, "layout": layout("chunk", "tokens per second", **more), "height": 360}


def for_paper(task: ReportTask, axes: Any) -> None:
    for index, cell in enumerate(task.done):
        axes.plot(
            range(1, len(cell.details.rates) + 1),
            [rate for _, rate in cell.details.rates],
            marker=in_turn(MARKERS, index),
            color=in_turn(PALETTE, index),
            markersize=3,
            linewidth=1,
            label=cell.name,
        )
    axes.set(xlabel="chunk", ylabel="tokens per second", ylim=(0, None))
    axes.legend(fontsize=7)
