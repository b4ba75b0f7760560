"""`row_costs.jsonl` in a task's folder: the row costs that its sessions measured, from which predictions are made."""

import json
from pathlib import Path

from stepsaver.bench.checksums import document_holds, seal_document
from stepsaver.bench.durable import write_beside
from stepsaver.engine.row_costs import RowCosts, row_costs_from_json

ROW_COSTS = "row_costs.jsonl"

CostsBySession = dict[str, RowCosts]


def store_row_costs(folder: Path, session: str, costs: RowCosts) -> None:
    """Adds what a session measured. No other process may be writing."""
    write_row_costs(folder, read_row_costs(folder) | {session: costs})


def write_row_costs(folder: Path, by_session: CostsBySession) -> None:
    """Writes a line per session, each with its checksum."""
    contents = ({"session": session, **costs.as_json()} for session, costs in by_session.items())
    lines = (json.dumps(seal_document(content)) for content in contents)
    write_beside(folder / ROW_COSTS, "".join(f"{line}\n" for line in lines))


def read_row_costs(folder: Path) -> CostsBySession:
    """Returns the costs without lines that do not hold or are of another version: no run goes on from them."""
    path = folder / ROW_COSTS
    found: CostsBySession = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            content = json.loads(line)
            if document_holds(content):
                found[content["session"]] = row_costs_from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found
