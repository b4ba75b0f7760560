"""The figures of a report as PDF and PNG, for a paper."""

from collections.abc import Sequence
from pathlib import Path

from stepsaver.report.cells import ReportTask
from stepsaver.report.figures import all_figures, figure_name

WIDTH, HEIGHT, HEIGHT_PER_LINE = 5.5, 3.4, 0.16
MANY_LINES = 12


def write_paper_figures(tasks: Sequence[ReportTask], folder: Path) -> list[Path]:
    """A file per task, figure and format; figures that a task has no data for are not written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in tasks:
        for each in all_figures():
            if not each.is_there(task):
                continue
            lines = max(len(task.done), *(len(cell.details.subjects) for cell in task.done))
            height = HEIGHT + HEIGHT_PER_LINE * max(0, lines - MANY_LINES)
            figure, axes = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
            each.for_paper(task, axes)
            axes.set_title(f"{task.experiment.name}, {task.folder}: {each.TITLE.lower()}", fontsize=9)
            for ending in ("pdf", "png"):
                written.append(folder / f"{task.folder}_{figure_name(each)}.{ending}")
                figure.savefig(written[-1], dpi=200)
            pyplot.close(figure)
    return written
