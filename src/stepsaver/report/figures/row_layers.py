"""Where the row-layers go: computed in each kind of step, and reused."""

from typing import Any

from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.figures import PlotlyFigure
from stepsaver.report.figures._step_kinds import COMPUTED_KINDS, stacked_axes, stacked_bars

ORDER = 1
TITLE = "Where the row-layers go"
CAPTION = "Rows summed over layers (MLP), as executed; reused ones were added from a cache or served without a forward."


def is_there(task: ReportTask) -> bool:
    return any(any(_shares(cell).values()) for cell in task.done)


def _shares(cell: ReportCell) -> dict[str, float]:
    assert cell.summary is not None
    by_kind = cell.summary.cost.by_kind
    computed = {kind: by_kind.get(kind, {}).get("row_layers", 0.0) for kind in COMPUTED_KINDS}
    return computed | {"reused": cell.summary.cost.row_layers_reused}


def for_page(task: ReportTask) -> PlotlyFigure:
    return stacked_bars([(cell.name, _shares(cell)) for cell in task.done], "row-layers")


def for_paper(task: ReportTask, axes: Any) -> None:
    stacked_axes(axes, [(cell.name, _shares(cell)) for cell in task.done], "row-layers")
