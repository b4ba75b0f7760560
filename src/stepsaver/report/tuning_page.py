"""The page of a tuning: what was tried, the recipe, and what was confirmed."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from stepsaver.bench.store import read_cell_files, read_run
from stepsaver.report.blocks import Block, TableEntry, cell, facts, figure, interval, number, tab, table
from stepsaver.report.figures import PALETTE, layout, plain
from stepsaver.report.html_pages import report_page
from stepsaver.report.parallelism import TokensPerForward, stored_tokens_per_forward

Row = Mapping[str, Any]


def tuning_page(document: Row) -> str:
    of = drop_name(document)
    blocks = [_figure(document, of), *_recipe(document), _attempts(document, of), _candidates(document, of)]
    never_run = document["never_run"]
    items = [("candidates", str(len(never_run))), ("which", ", ".join(never_run) or "none")]
    blocks.append(facts("Never run", items, name="not-run", is_folded=True))
    lead = (
        f"No problem is used both to search and to confirm. At most {document['max_drop']:g} points of {of}; "
        "every interval is paired with plain decoding on the same problems."
    )
    about = f"stepsaver tune · model {document['model']} · batch size {document['batch_size']}"
    page_tab = tab(document["task"], blocks, outcome=document["outcome"], sentence=document["sentence"])
    return report_page(document["question"], lead, about, [page_tab], {})


def drop_name(document: Row) -> str:
    return "drop" if document["measure"] == "accuracy" else "loss of agreement with plain decoding"


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


def parallelism_line(document: Row) -> str:
    """Returns the baseline's and the winner's tokens per forward in one line; empty if they are not known."""
    return "; ".join(
        f"{each['name']}: {TokensPerForward(each['tokens_per_step'], each['tokens_per_forward'])}"
        for each in document["parallelism"]
    )


def _recipe(document: Row) -> list[Block]:
    if document["recipe"] is None:
        return []
    settings = {name: value for name, value in document["recipe"].items() if name not in ("made_for", "measured")}
    items = [(name.replace("_", " "), _text(value)) for name, value in settings.items()]
    line = parallelism_line(document)
    return [facts("Recipe", [*items, *([("tokens per forward", line)] if line else [])], name="recipe")]


def _text(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _figure(document: Row, of: str) -> Block:
    ended = [each for each in document["attempts"] if each["drop"]]
    fresh = [{**each, "drop_points": [100 * bound for bound in each["drop"]]} for each in ended]
    seen = [each for each in document["candidates"] if isfinite(each["speed_up"][0])]
    traces = [_trace("searched", seen, PALETTE[0]), _trace("on fresh problems", fresh, PALETTE[2], symbol="star")]
    limit = document["max_drop"]
    shapes = [{"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": limit, "y1": limit}]
    content = {"data": traces, "layout": layout("speed-up", f"{of} (points)", shapes=shapes)}
    caption = "Every candidate on the problems that it was searched on; the line is the limit."
    return figure("What was tried", content, caption=caption, name="tried")


def _trace(name: str, rows: Sequence[Row], colour: str, symbol: str = "circle") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [each["speed_up"][0] for each in rows],
        "y": [each["drop_points"][0] for each in rows],
        "text": [plain(each["name"]) for each in rows],
        "marker": {"color": colour, "symbol": symbol},
    }


def _measured(each: Row, drop: Sequence[float] | None) -> list[TableEntry]:
    """The entries of a speed-up and a drop, with their intervals where there are any."""
    entries = []
    for values, form, suffix in ((each["speed_up"], ".2f", "x"), (drop, "+.2f", "")):
        small = interval(values[1], values[2], form) if values and len(values) > 1 else ""
        entries.append(number(values[0] if values else None, form, suffix=suffix, small=small))
    return [*entries, cell(str(each["problems"]), each["problems"])]


def _attempts(document: Row, of: str) -> Block:
    rows = [
        [
            cell(str(each["number"]), each["number"]),
            cell(each["name"]),
            cell(each["outcome"]),
            *_measured(each, each["drop"] and [100 * bound for bound in each["drop"]]),
            cell(f"{100 * each['confidence']:g} %"),
        ]
        for each in document["attempts"]
    ]
    columns = ("attempt", "candidate", "outcome", "speed-up", f"{of} (points)", "fresh problems", "confidence")
    caption = "Each candidate sees fresh problems once; every further attempt halves the error of the one before."
    return table("Confirmation", columns, rows, caption=caption, name="attempts")


def _candidates(document: Row, of: str) -> Block:
    rows = [
        [cell(each["name"]), *_measured(each, each["drop_points"]), cell(str(each["rank"] or ""), each["rank"])]
        for each in document["candidates"]
    ]
    columns = ("candidate", "speed-up", f"{of} (points)", "problems", "rank")
    caption = "On the problems of the search, with 95 % intervals; a single chunk has no interval of its speed."
    return table("Everything that was tried", columns, rows, caption=caption, name="candidates")
