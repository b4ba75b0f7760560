"""The figures of a task: drawn by plotly in the page and by matplotlib for a paper.

The colours of the page's text, grid and background are set in the page, because they follow its theme.
"""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepsaver.report.cells import ReportTask

# Okabe and Ito's colours, two of them darkened, told apart by most eyes on light and on dark ground
PALETTE = (
    "#4477cc", "#e08a1e", "#2a9d7f", "#c8476d", "#8a63c9", "#a68a1b", "#3a9fc4", "#b5651d", "#7c8aa0", "#6a9f3f",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "p", "h")
FRONT, REGION = "#7c8aa0", "#2a9d7f"
WORK = {  # of each kind of step, and what was not computed: its name and colour
    "prefill": ("prefill", "#7c8aa0"),
    "full": ("full steps", "#4477cc"),
    "sub": ("sub-block steps", "#7fb0ee"),
    "commit": ("commits", "#a68a1b"),
    "draft": ("drafts", "#8a63c9"),
    "verify": ("verifications", "#c8476d"),
    "reused": ("reused", "#2a9d7f"),
}
PAPER_WIDTH, PAPER_HEIGHT, HEIGHT_PER_CONFIG, MANY_CONFIGS = 5.5, 3.4, 0.16, 12  # inches

PlotlyFigure = dict[str, Any]


class Drawing(NamedTuple):
    name: str
    title: str
    caption: str
    is_there: Callable[[ReportTask], bool]
    for_page: Callable[[ReportTask], PlotlyFigure]
    for_paper: Callable[[ReportTask, Any], None]


class Point(NamedTuple):
    """Accuracy in percent, throughput in tokens per second, as the median over chunks."""

    name: str
    rate: float
    rate_low: float
    rate_high: float
    accuracy: float
    low: float
    high: float


class Region(NamedTuple):
    """The lower left corner of where a config would succeed."""

    rate: float
    accuracy: float


def points(task: ReportTask) -> list[Point]:
    return [
        Point(each.config, *each.rate, *(100 * share for share in (each.accuracy, *each.accuracy_interval)))
        for each in task.summaries
        if each.rate is not None
    ]


def wanted_regions(task: ReportTask) -> list[Region]:
    """Returns one per baseline and criterion; none unless the criterion is a least speed-up and a largest drop."""
    experiment, drawn = task.experiment, {each.name: each for each in points(task)}
    asked = dict.fromkeys((experiment.baseline_of(name), experiment.success_of(name).confirm_if) for name in drawn)
    return [
        Region(drawn[name].rate * wanted.speed_up.bound, drawn[name].accuracy - wanted.drop_points.bound)
        for name, wanted in asked
        if name in drawn and wanted.speed_up.sign == ">" and wanted.drop_points.sign == "<"
    ]


def pareto_front(found: Sequence[Point]) -> list[Point]:
    """Returns the points that no other one beats in both accuracy and throughput, from slow to fast."""
    front: list[Point] = []
    for point in sorted(found, key=lambda each: (-each.rate, -each.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front[::-1]


def ranges(found: Sequence[Point], regions: Sequence[Region]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns axes that hold every interval and some of each region. No config is better than 100 %."""
    rates = [value for each in found for value in (each.rate_low, each.rate_high)]
    shares = [value for each in found for value in (each.low, each.high)]
    for region in regions:
        rates.append(region.rate * 1.04)
        shares += [region.accuracy, region.accuracy + 4]
    pads = [0.05 * (max(each) - min(each)) or 1.0 for each in (rates, shares)]
    return (
        (max(0.0, min(rates) - pads[0]), max(rates) + pads[0]),
        (max(-1.0, min(shares) - pads[1]), min(101.0, max(shares) + pads[1])),
    )


def scatter(groups: dict[str, list[Point]], regions: Sequence[Region]) -> PlotlyFigure:
    """Draws several groups of points: those after the first have open marks; configs of the same name look alike."""
    first = next(iter(groups.values()))
    everything = [each for group in groups.values() for each in group]
    front = pareto_front(first)
    line = {
        "x": [each.rate for each in front],
        "y": [each.accuracy for each in front],
        "mode": "lines",
        "line": {"dash": "dot", "width": 1.5, "color": FRONT},
        "name": "Pareto front",
        "hoverinfo": "skip",
        "showlegend": len(front) > 1,
    }
    indices = {name: index for index, name in enumerate(dict.fromkeys(each.name for each in everything))}
    known = {each.name for each in first}
    traces = [
        _mark(point, indices[point.name], group, is_open=found is not first, is_new=point.name not in known)
        for group, found in groups.items()
        for point in found
    ]
    xs, ys = ranges(everything, regions)
    shapes = [_shape(region, xs[1], ys[1]) for region in regions]
    more = {"shapes": shapes, "xaxis": {"range": list(xs)}, "yaxis": {"range": list(ys), "ticksuffix": " %"}}
    return {"data": [line, *traces], "layout": layout("tokens per second", "accuracy", **more), "height": 460}


def _mark(point: Point, index: int, group: str, *, is_open: bool, is_new: bool) -> dict[str, Any]:
    colour, name = in_turn(PALETTE, index), f"{point.name} ({group})" if group else point.name
    hover = (
        f"{plain(name)}<br>{point.accuracy:.1f} % [{point.low:.1f}, {point.high:.1f}]"
        f"<br>{point.rate:.0f} tokens/s [{point.rate_low:.0f}, {point.rate_high:.0f}]"
    )
    bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
    return {
        "x": [point.rate],
        "y": [point.accuracy],
        "error_x": bars | {"array": [point.rate_high - point.rate], "arrayminus": [point.rate - point.rate_low]},
        "error_y": bars | {"array": [point.high - point.accuracy], "arrayminus": [point.accuracy - point.low]},
        "mode": "markers",
        "marker": {"color": colour, "size": 11, "symbol": in_turn(SYMBOLS, index) + ("-open" if is_open else "")},
        "name": plain(name),
        "showlegend": is_new or not is_open,
        "text": [hover],
        "hoverinfo": "text",
        "meta": "config",
    }


def _shape(region: Region, right: float, top: float) -> dict[str, Any]:
    corners = {"x0": region.rate, "x1": right, "y0": region.accuracy, "y1": top}
    look = {"fillcolor": REGION, "opacity": 0.14, "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", "name": "wanted", **corners, **look}


def _accuracy_speed_for_paper(task: ReportTask, axes: Any) -> None:
    found, regions = points(task), wanted_regions(task)
    xs, ys = ranges(found, regions)
    for region in regions:
        axes.fill_between([region.rate, xs[1]], region.accuracy, ys[1], color=REGION, alpha=0.14, linewidth=0)
    front = pareto_front(found)
    axes.plot([each.rate for each in front], [each.accuracy for each in front], ":", color=FRONT, zorder=1)
    for index, point in enumerate(found):
        axes.errorbar(
            point.rate,
            point.accuracy,
            xerr=[[point.rate - point.rate_low], [point.rate_high - point.rate]],
            yerr=[[point.accuracy - point.low], [point.high - point.accuracy]],
            fmt=in_turn(MARKERS, index),
            color=in_turn(PALETTE, index),
            elinewidth=0.8,
            capsize=2,
            label=point.name,
        )
    axes.set(xlim=xs, ylim=ys, xlabel="tokens per second", ylabel="accuracy (%)")
    axes.legend(fontsize=7)


def work(task: ReportTask) -> dict[str, dict[str, float]]:
    """Returns, by kind of step and then by config, the positions x layers that were computed, and last those reused."""
    costs = {each.config: each.cost for each in task.summaries}
    done = {
        kind: {name: cost.by_kind.get(kind, {}).get("row_layers", 0.0) for name, cost in costs.items()}
        for kind in WORK
        if kind != "reused"
    }
    everything = done | {"reused": {name: float(cost.row_layers_reused) for name, cost in costs.items()}}
    return {kind: each for kind, each in everything.items() if any(each.values())}


def _work_for_page(task: ReportTask) -> PlotlyFigure:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [plain(name) for name in by_config],
            "x": list(by_config.values()),
            "name": WORK[kind][0],
            "marker": {"color": WORK[kind][1]},
            "hovertemplate": "%{y}, " + WORK[kind][0] + ": %{x:,.4~g} positions x layers<extra></extra>",
        }
        for kind, by_config in work(task).items()
    ]
    axis = {"autorange": "reversed", "type": "category"}
    more = {"barmode": "stack", "bargap": 0.3, "yaxis": axis}
    return {"data": traces, "layout": layout("positions x layers", "", **more), "height": 120 + 26 * len(task.done)}


def _work_for_paper(task: ReportTask, axes: Any) -> None:
    names = [each.config for each in task.summaries]
    left = [0.0] * len(names)
    for kind, by_config in work(task).items():
        axes.barh(range(len(names)), list(by_config.values()), left=left, label=WORK[kind][0], color=WORK[kind][1])
        left = [one + other for one, other in zip(left, by_config.values(), strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("positions x layers")
    axes.legend(fontsize=7)


def _rates_for_page(task: ReportTask) -> PlotlyFigure:
    traces = [
        {
            "x": list(range(1, len(cell.rates) + 1)),
            "y": [rate for _, rate in cell.rates],
            "mode": "lines+markers",
            "line": {"width": 1.5, "color": in_turn(PALETTE, index)},
            "marker": {"size": 6, "symbol": in_turn(SYMBOLS, index)},
            "name": plain(cell.name),
            "text": [
                f"{plain(cell.name)}<br>{rate:.0f} tokens/s, {minutes:.1f} minutes after the first chunk"
                for minutes, rate in cell.rates
            ],
            "hoverinfo": "text",
        }
        for index, cell in enumerate(task.done)
    ]
    most = max(len(cell.rates) for cell in task.done)
    more = {"yaxis": {"rangemode": "tozero"}, "xaxis": {"dtick": max(1, most // 10)}}
    return {"data": traces, "layout": layout("chunk", "tokens per second", **more), "height": 360}


def _rates_for_paper(task: ReportTask, axes: Any) -> None:
    for index, cell in enumerate(task.done):
        axes.plot(
            range(1, len(cell.rates) + 1),
            [rate for _, rate in cell.rates],
            marker=in_turn(MARKERS, index),
            color=in_turn(PALETTE, index),
            markersize=3,
            linewidth=1,
            label=cell.name,
        )
    axes.set(xlabel="chunk", ylabel="tokens per second", ylim=(0, None))
    axes.legend(fontsize=7)


ACCURACY_SPEED = Drawing(
    "accuracy_speed",
    "Accuracy against throughput",
    "A point per config with its 95 % intervals; throughput is the median over chunks, which one slow chunk does not "
    "move. The dotted line joins the configs that no other one beats in both. "
    "In the shaded region a config would meet the success criterion, measured from its baseline.",
    lambda task: bool(points(task)),
    lambda task: scatter({"": points(task)}, wanted_regions(task)),
    _accuracy_speed_for_paper,
)
FIGURES = (
    ACCURACY_SPEED,
    Drawing(
        "work",
        "Where the work goes",
        "Rows summed over layers (MLP), as executed; reused ones were added from a cache or served without a forward.",
        lambda task: bool(work(task)),
        _work_for_page,
        _work_for_paper,
    ),
    Drawing(
        "rate_over_time",
        "Throughput over time",
        "Tokens per second of each chunk, in the order in which a config's chunks ran. "
        "A cold start is a low first point.",
        lambda task: any(cell.rates for cell in task.done),
        _rates_for_page,
        _rates_for_paper,
    ),
)


def write_paper_figures(tasks: Sequence[ReportTask], folder: Path) -> list[Path]:
    """Writes a PDF and a PNG per task and figure; figures that a task has no data for are not written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in tasks:
        for each in FIGURES:
            if not each.is_there(task):
                continue
            height = PAPER_HEIGHT + HEIGHT_PER_CONFIG * max(0, len(task.done) - MANY_CONFIGS)
            figure, axes = pyplot.subplots(figsize=(PAPER_WIDTH, height), layout="constrained")
            each.for_paper(task, axes)
            axes.set_title(f"{task.experiment.name}, {task.folder}: {each.title.lower()}", fontsize=9)
            for ending in ("pdf", "png"):
                written.append(folder / f"{task.folder}_{each.name}.{ending}")
                figure.savefig(written[-1], dpi=200)
            pyplot.close(figure)
    return written


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
