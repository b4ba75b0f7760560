"""The page of a tuning: what was tried, the frontier of speed-up against drop, and what was confirmed."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from stepsaver.bench.store import read_cell_files, read_run
from stepsaver.report.blocks import Block, TableEntry, cell, facts, figure, interval, number, tab, table
from stepsaver.report.figures import PALETTE, layout, plain
from stepsaver.report.parallelism import COLUMNS as PARALLELISM
from stepsaver.report.parallelism import TPF_CAPTION, TokensPerForward, stored_tokens_per_forward
from stepsaver.report.report_page import report_page

Row = Mapping[str, Any]


def tuning_page(document: Mapping[str, Any]) -> str:
    of = drop_name(document)
    blocks = [_frontier(document, of), _attempts(document, of), _candidates(document, of), _not_run(document)]
    recipe = document["recipe"]
    if recipe:
        shown = ("decode", "rules", "policy", "sub_block_size", "join", "batch_size")
        items = [(name.replace("_", " "), _text(recipe[name])) for name in shown if name in recipe]
        blocks.insert(1, facts("Recipe", items, name="recipe"))
    if document["parallelism"]:
        blocks.insert(2, _parallelism(document))
    lead = (
        f"No problem is used both to search and to confirm. At most {document['max_drop']:g} points of {of}; "
        "every interval is paired with plain decoding on the same problems."
    )
    about = f"stepsaver tune · model {document['model']} · batch size {document['batch_size']}"
    page_tab = tab(document["task"], blocks, outcome=document["outcome"], sentence=document["sentence"])
    return report_page(document["question"], lead, about, [page_tab], {})


def drop_name(document: Mapping[str, Any]) -> str:
    is_accuracy = document["measure"] == "accuracy"
    return "drop" if is_accuracy else "loss of agreement with plain decoding"


def confirmed_parallelism(folder: Path, names: Sequence[str], chunks: Collection[int]) -> list[dict[str, Any]]:
    """Returns the tokens per forward of configs on those of some chunks that all have stored; nothing if one has none.

    `folder` is that of the task in the results.
    """
    runs = {name: read_run(folder / name) for name in names}
    cells = {name: read_cell_files(folder / name, run.run_id) for name, run in runs.items() if run is not None}
    shared = set(chunks).intersection(*(cell.records for cell in cells.values()))
    found = {name: stored_tokens_per_forward(cell, shared) for name, cell in cells.items()}
    rows = [{"name": name, **each._asdict()} for name, each in found.items() if each is not None]
    return rows if len(rows) == len(names) else []


def parallelism_line(document: Mapping[str, Any]) -> str:
    """Returns the baseline's and the winner's tokens per forward in one line; empty if they are not known."""
    return "; ".join(
        f"{each['name']}: {TokensPerForward(each['tokens_per_step'], each['tokens_per_forward'])}"
        for each in document["parallelism"]
    )


def _parallelism(document: Mapping[str, Any]) -> Block:
    rows = [
        [cell(each["name"]), number(each["tokens_per_step"], ".2f"), number(each["tokens_per_forward"], ".2f")]
        for each in document["parallelism"]
    ]
    columns = (PARALLELISM[0], *PARALLELISM[2:4])
    caption = f"On the fresh problems that confirmed it. {TPF_CAPTION}"
    return table("Tokens per forward", columns, rows, caption=caption, name="parallelism")


def frontier(candidates: Sequence[Row]) -> list[Row]:
    """Returns the candidates that no other one beats in both speed-up and drop, the fastest last."""
    front: list[Row] = []
    for each in sorted(candidates, key=lambda one: (-one["speed_up"], one["drop_points"])):
        if not front or each["drop_points"] < front[-1]["drop_points"]:
            front.append(each)
    return front[::-1]


def _interval(bounds: Sequence[float], form: str) -> str:
    low, high = bounds
    return interval(low, high, form)


def _text(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _frontier(document: Mapping[str, Any], of: str) -> Block:
    seen = [each for each in document["candidates"] if isfinite(each["speed_up"])]
    front = frontier(seen)
    traces: list[dict[str, Any]] = [
        _trace("tried", seen, PALETTE[0], mode="markers", opacity=0.5),
        _trace("frontier", front, PALETTE[1], mode="lines+markers", line={"dash": "dot"}),
    ]
    tried = [
        {"name": each["name"], "speed_up": each["speed_up"][0], "drop_points": each["drop_points"][0]}
        for each in document["attempts"]
    ]
    traces.append(_trace("on fresh problems", tried, PALETTE[2], mode="markers", marker={"size": 12, "symbol": "star"}))
    shapes = [
        {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": document["max_drop"], "y1": document["max_drop"]}
    ]
    content = {
        "data": traces,
        "layout": layout("speed-up", f"{of} (points)", shapes=shapes),
    }
    caption = "Every candidate on the problems it was searched on; the line is the limit."
    return figure("Frontier", content, caption=caption, name="frontier")


def _trace(name: str, rows: Sequence[Row], colour: str, **more: Any) -> dict[str, Any]:
    marker = {"color": colour} | more.pop("marker", {})
    return {
        "type": "scatter",
        "name": name,
        "x": [each["speed_up"] for each in rows],
        "y": [each["drop_points"] for each in rows],
        "text": [plain(each["name"]) for each in rows],
        "marker": marker,
        **more,
    }


def _attempts(document: Mapping[str, Any], of: str) -> Block:
    rows = [
        [
            cell(str(each["number"]), each["number"]),
            cell(each["name"]),
            cell(each["outcome"], small=each["reason"]),
            number(each["speed_up"][0], ".2f", suffix="x", small=_interval(each["speed_up"][1:], ".2f")),
            number(each["drop_points"][0], "+.2f", small=_interval(each["drop_points"][1:], "+.2f")),
            cell(str(each["problems"]), each["problems"]),
            cell(f"{100 * each['confidence']:g} %"),
        ]
        for each in document["attempts"]
    ]
    columns = ("attempt", "candidate", "outcome", "speed-up", f"{of} (points)", "fresh problems", "confidence")
    caption = "Each candidate sees fresh problems once; every further attempt halves the error of the one before."
    return table("Confirmation", columns, rows, caption=caption, name="attempts")


def _candidates(document: Mapping[str, Any], of: str) -> Block:
    rows = [_candidate(each) for each in document["candidates"]]
    columns = ("candidate", "speed-up", "predicted here", f"{of} (points)", "problems", "why it left")
    caption = "On the problems of the search, with 95 % intervals; a single chunk has no interval of its speed."
    return table("Everything that was tried", columns, rows, caption=caption, name="candidates")


def _candidate(each: Row) -> list[TableEntry]:
    timed = each["speed_up_interval"]
    return [
        cell(each["name"]),
        number(each["speed_up"], ".2f", suffix="x", small=_interval(timed, ".2f") if timed else ""),
        number(each["predicted"], ".2f", suffix="x"),
        number(each["drop_points"], "+.1f", small=_interval(each["drop_interval"], "+.1f")),
        cell(str(each["problems"]), each["problems"]),
        cell(each["out"] or (f"rank {each['rank']}" if each["rank"] else "")),
    ]


def _not_run(document: Mapping[str, Any]) -> Block:
    names = document["not_run"]
    return facts("Never run", [("candidates", str(len(names))), ("which", ", ".join(names) or "none")], name="not-run")
