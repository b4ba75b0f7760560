"""Accuracy against throughput: a point per config, intervals both ways, the Pareto front and the wanted region."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from stepsaver.report.cells import ReportTask
from stepsaver.report.figures import MARKERS, PALETTE, SYMBOLS, PlotlyFigure, in_turn, layout, plain

ORDER = 0
TITLE = "Accuracy against throughput"
CAPTION = (
    "A point per config with its 95 % intervals; throughput is the median over chunks, which one slow chunk does not "
    "move. The dotted line joins the configs that no other one beats in both. "
    "In the shaded region a config would meet the success criterion, measured from its baseline."
)
REGION = "rgba(42, 157, 127, 0.14)"


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


def is_there(task: ReportTask) -> bool:
    return bool(points(task))


def points(task: ReportTask) -> list[Point]:
    found = []
    for cell in task.done:
        assert cell.summary is not None
        rate = cell.summary.rate
        if rate is None:
            continue
        accuracy = [100 * each for each in (cell.summary.accuracy, *cell.summary.accuracy_interval)]
        found.append(Point(cell.name, *rate, *accuracy))
    return found


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


def for_page(task: ReportTask) -> PlotlyFigure:
    return scatter({"": points(task)}, wanted_regions(task))


def scatter(groups: dict[str, list[Point]], regions: Sequence[Region]) -> PlotlyFigure:
    """Draws several groups of points: those after the first have open marks; configs of the same name look alike."""
    first = next(iter(groups.values()))
    everything = [each for group in groups.values() for each in group]
    front = pareto_front(first)
    line = {
        "x": [each.rate for each in front],
        "y": [each.accuracy for each in front],
        "mode": "lines",
        "line": {"dash": "dot", "width": 1.5, "color": "#7c8aa0"},
        "name": "Pareto front",
        "hoverinfo": "skip",
        "showlegend": len(front) > 1,
    }
    indices = {name: index for index, name in enumerate(dict.fromkeys(each.name for each in everything))}
    known = {each.name for each in first}
    traces = [
        _trace(point, indices[point.name], group, is_open=found is not first, is_new=point.name not in known)
        for group, found in groups.items()
        for point in found
    ]
    xs, ys = ranges(everything, regions)
    shapes = [_shape(region, xs[1], ys[1]) for region in regions]
    more = {"shapes": shapes, "xaxis": {"range": list(xs)}, "yaxis": {"range": list(ys), "ticksuffix": " %"}}
    return {"data": [line, *traces], "layout": layout("tokens per second", "accuracy", **more), "height": 460}


def _trace(point: Point, index: int, group: str, *, is_open: bool, is_new: bool) -> dict[str, Any]:
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
    return {"type": "rect", **corners, "fillcolor": REGION, "line": {"width": 0}, "layer": "below", "name": "wanted"}


def for_paper(task: ReportTask, axes: Any) -> None:
    found, regions = points(task), wanted_regions(task)
    xs, ys = ranges(found, regions)
    for region in regions:
        axes.fill_between([region.rate, xs[1]], region.accuracy, ys[1], color="#2a9d7f", alpha=0.14, linewidth=0)
    front = pareto_front(found)
    axes.plot([each.rate for each in front], [each.accuracy for each in front], ":", color="#7c8aa0", zorder=1)
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
