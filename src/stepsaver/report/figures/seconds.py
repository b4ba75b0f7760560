"""Where the time goes: prefill as measured, the decode's seconds shared out among the kinds of steps."""

from typing import Any

from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.figures import PlotlyFigure
from stepsaver.report.figures._step_kinds import COMPUTED_KINDS, stacked_axes, stacked_bars

ORDER = 2
TITLE = "Where the time goes"
CAPTION = (
    "Seconds of the whole run. Prefill is measured; steps of different kinds share a forward, so the rest is shared "
    "out by their operations. Steps that reuse everything take no forward and next to no time."
)


def is_there(task: ReportTask) -> bool:
    return any(any(_shares(cell).values()) for cell in task.done)


def _shares(cell: ReportCell) -> dict[str, float]:
    assert cell.summary is not None
    whole, prefill = cell.summary.throughput.decode_seconds, cell.details.prefill_seconds
    by_kind = cell.summary.cost.by_kind
    operations = {kind: by_kind.get(kind, {}).get("flops", 0.0) for kind in COMPUTED_KINDS if kind != "prefill"}
    total = sum(operations.values()) or 1.0
    return {"prefill": prefill} | {kind: (whole - prefill) * each / total for kind, each in operations.items()}


def for_page(task: ReportTask) -> PlotlyFigure:
    return stacked_bars([(cell.name, _shares(cell)) for cell in task.done], "seconds")


def for_paper(task: ReportTask, axes: Any) -> None:
    stacked_axes(axes, [(cell.name, _shares(cell)) for cell in task.done], "seconds")
