"""How long the answers are: a config that runs away or breaks off looks fast for the wrong reason."""

from typing import Any

from stepsaver.report.cells import ReportTask
from stepsaver.report.figures import PALETTE, PlotlyFigure, in_turn, layout, plain

ORDER = 4
TITLE = "Tokens per sample"
CAPTION = (
    "Least, quartiles, most and mean (dashed) over the samples. Answers of unlike length make rates hard to compare."
)


def is_there(task: ReportTask) -> bool:
    return any(cell.details.tokens for cell in task.done)


def for_page(task: ReportTask) -> PlotlyFigure:
    traces = []
    for index, cell in enumerate(task.done):
        if not cell.details.tokens:
            continue
        least, lower, median, upper, most, mean = cell.details.tokens
        box = {"lowerfence": least, "q1": lower, "median": median, "q3": upper, "upperfence": most, "mean": mean}
        name = plain(cell.name)
        traces.append(
            {"type": "box", "orientation": "h", "y": [name], "name": name, "boxmean": True, "showlegend": False}
            | {key: [value] for key, value in box.items()}
            | {"marker": {"color": in_turn(PALETTE, index)}}
        )
    more = {"xaxis": {"rangemode": "tozero"}, "yaxis": {"autorange": "reversed", "type": "category"}}
    return {"data": traces, "layout": layout("tokens", "", **more), "height": 90 + 26 * len(traces)}


def for_paper(task: ReportTask, axes: Any) -> None:
    names = ("whislo", "q1", "med", "q3", "whishi", "mean")
    boxes = [
        dict(zip(names, cell.details.tokens, strict=True)) | {"label": cell.name}
        for cell in task.done
        if cell.details.tokens
    ]
    axes.bxp(boxes, showfliers=False, showmeans=True, meanline=True, orientation="horizontal")
    axes.invert_yaxis()
    axes.set(xlabel="tokens per sample", xlim=(0, None))
