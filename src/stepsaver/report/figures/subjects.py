"""Accuracy by subject, where a task's documents name one or the task is a group of tasks."""

from typing import Any

from stepsaver.report.cells import ReportTask
from stepsaver.report.figures import PlotlyFigure, layout, plain

ORDER = 5
TITLE = "Accuracy by subject"
CAPTION = "Percent right. A mean can hide that one subject pays for all."


def is_there(task: ReportTask) -> bool:
    return any(cell.details.subjects for cell in task.done)


def _subjects(task: ReportTask) -> list[str]:
    return sorted({subject for cell in task.done for subject in cell.details.subjects})


def _shares(task: ReportTask) -> list[list[float | None]]:
    """Returns a row per subject, a column per config."""
    return [
        [100 * found[0] / found[1] if (found := cell.details.subjects.get(subject)) else None for cell in task.done]
        for subject in _subjects(task)
    ]


def for_page(task: ReportTask) -> PlotlyFigure:
    subjects, shares = _subjects(task), _shares(task)
    counts = [[cell.details.subjects.get(subject, (0, 0))[1] for cell in task.done] for subject in subjects]
    heat = {
        "type": "heatmap",
        "x": [plain(cell.name) for cell in task.done],
        "y": [plain(subject) for subject in subjects],
        "z": shares,
        "customdata": counts,
        "zmin": 0,
        "zmax": 100,
        "colorscale": [[0, "#f2e3d5"], [0.5, "#dfe7f5"], [1, "#3f6fc6"]],
        "showscale": False,
        "texttemplate": "%{z:.0f}",
        "hovertemplate": "%{y}, %{x}: %{z:.1f} % of %{customdata}<extra></extra>",
        "xgap": 2,
        "ygap": 2,
    }
    more = {"yaxis": {"autorange": "reversed", "type": "category"}, "xaxis": {"type": "category"}}
    return {"data": [heat], "layout": layout("", "", **more), "height": 120 + 26 * len(subjects)}


def for_paper(task: ReportTask, axes: Any) -> None:
    import numpy as np

    subjects, shares = _subjects(task), np.array(_shares(task), dtype=float)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(task.done)), [cell.name for cell in task.done], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(subjects)), subjects, fontsize=8)
    for row, column in np.argwhere(~np.isnan(shares)):
        value = shares[row, column]
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color="w" if value > 60 else "k")
