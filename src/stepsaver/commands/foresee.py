"""`stepsaver foresee`: what the speed-ups of an experiment would be on devices that we do not have. All of it is
projected, from counted steps and data sheets; `here` projects onto the machine that ran it, beside what was measured.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from stepsaver.commands._experiment_options import Chosen, add_cell_arguments, choose
from stepsaver.engine.errors import UsageError, shown, unknown_name

if TYPE_CHECKING:
    from stepsaver.bench.judging.foresight import CountedRun
    from stepsaver.bench.results.summary import Summary
    from stepsaver.engine.row_costs import RowCosts

HELP = "speed-ups projected onto devices that are not here, from counted steps and data sheets"
HERE = "here"
MOST_BATCH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument(
        "--model-shape", default="7B", metavar="S", help="135M, 0.5B, 1.5B or 7B (default: %(default)s)"
    )
    parser.add_argument(
        "--on", default="rtx6000,a100,h100", metavar="D,...", help=f"devices, or `{HERE}` (default: %(default)s)"
    )
    parser.add_argument("--batch", default="1,8,32", metavar="N,...", help="samples at a time (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.machine.device_profiles import device_names
    from stepsaver.bench.machine.shapes import SHAPES
    from stepsaver.report.tables import plain_table

    chosen = choose(options)
    devices, batches = options.on.split(","), _batches(options.batch)
    if options.model_shape not in SHAPES:
        raise unknown_name("model shape", options.model_shape, SHAPES)
    for device in devices:
        if device not in (HERE, *device_names()):
            raise unknown_name("device", device, [*device_names(), HERE])
    documents: dict[str, list[dict[str, Any]]] = {}
    for task, folder in chosen.cell_folders.items():
        stored = _stored(chosen, folder)
        if len(stored.summaries) > 1:
            documents[task] = [row for each in devices for row in _rows(stored, each, options.model_shape, batches)]
    if not documents:
        raise chosen.nothing_there()
    if options.json:
        print(json.dumps({"projected": True, "model_shape": options.model_shape, "tasks": documents}))
        return 0
    for task, rows in documents.items():
        print(f"{task}: PROJECTED tokens/s against the baseline, from counted steps; nothing of this was measured")
        print(plain_table([_cells(row) for row in rows], ("device", "batch", "config", "projected", "measured", "")))
    return 0


def _batches(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= each <= MOST_BATCH for each in found):
        raise UsageError(f"--batch {shown(text)} is no list of numbers from 1 to {MOST_BATCH} such as 1,8,32")
    return found


class Stored(NamedTuple):
    """What is stored of a task."""

    chosen: Chosen
    summaries: "dict[str, Summary]"
    runs: "dict[str, CountedRun]"
    row_costs: "list[RowCosts]"


def _stored(chosen: Chosen, folder: str) -> Stored:
    from stepsaver.bench.experiment.folders import read_summaries
    from stepsaver.bench.judging.foresight import read_counted_run
    from stepsaver.bench.results.stored_costs import read_row_costs

    stored = chosen.results / folder
    summaries, costs = read_summaries(chosen.experiment, chosen.results, folder), read_row_costs(stored)
    if not summaries and (saved := chosen.artifacts(folder)):
        summaries, costs = {each.config: each for each in saved.summaries}, saved.row_costs
    told = {name: each for name, each in summaries.items() if each.throughput.tokens and not each.equal_to}
    runs = {name: read_counted_run(each, stored / name) for name, each in told.items()}
    return Stored(chosen, told, runs, list(costs.values()))


def _rows(stored: Stored, device: str, shape: str, batches: list[int]) -> list[dict[str, Any]]:
    from stepsaver.bench.machine.device_profiles import device_profile
    from stepsaver.bench.machine.shapes import SHAPES

    if device == HERE:
        if not stored.row_costs:
            raise UsageError(f"{stored.chosen.experiment.name}: what rows take on this machine is not stored")
        return _compared(stored, stored.row_costs[-1], {"device": HERE, "batch": None})
    profile, config = device_profile(device), SHAPES[shape]
    note = "" if profile.holds(config) else f"{shape} does not fit in its {profile.memory_gb:g} GB"
    found = []
    for batch in batches:
        found += _compared(stored, profile.row_costs(config), {"device": device, "batch": batch, "note": note})
    return found


def _compared(stored: Stored, costs: "RowCosts", where: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each config beside its baseline. On the machine that ran them, forwards are as full as they were."""
    from stepsaver.bench.judging.foresight import foreseen_seconds

    batch = where["batch"]
    seconds = {
        name: foreseen_seconds(run, costs, run.steps_per_forward if batch is None else batch * run.steps_per_sample)
        for name, run in stored.runs.items()
    }
    rows = []
    for name, summary in stored.summaries.items():
        baseline = stored.chosen.experiment.baseline_of(name)
        if name == baseline or baseline not in seconds:
            continue
        measured = summary.speed_up.tokens_per_s.value if batch is None else None
        rows.append(where | {"config": name, "projected": seconds[baseline] / seconds[name], "measured": measured})
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    measured, note = row["measured"], row.get("note", "")
    if measured is not None:
        note = f"{100 * (row['projected'] / measured - 1):+.0f} %"
    batch = "as run" if row["batch"] is None else str(row["batch"])
    return (
        row["device"],
        batch,
        row["config"],
        f"{row['projected']:.2f}",
        "-" if measured is None else f"{measured:.2f}",
        note,
    )
