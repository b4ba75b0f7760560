"""What `stepsaver run --dry-run` prints."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsaver.bench.dry_run import CellEstimate, Estimate, TaskEstimate

COLUMNS = ("config", "chunks", "samples", "forwards", "FLOPs", "time")


def print_dry_run(estimates: "list[TaskEstimate]", *, shards: int, as_json: bool) -> None:
    from stepsaver.bench.dry_run import total_cost
    from stepsaver.report.blocks import plain_table

    if as_json:
        print(json.dumps([asdict(task) for task in estimates]))
        return
    for task in estimates:
        print(f"{task.task}: {task.samples} samples in {task.chunks} chunks")
        print(plain_table([_row(cell) for cell in task.cells], COLUMNS))
        for basis in dict.fromkeys(cell.basis for cell in task.cells if cell.samples):
            print(f"estimated from {basis}")
        for note in task.notes:
            print(f"note: {note}")
        for cell in task.cells:
            if cell.remark:
                print(f"note: {cell.config}: {cell.remark}")
            if cell.timed_again:
                print(f"note: {cell.config}: {cell.timed_again} chunks are stored and timed again beside the others")
        print()
    total = total_cost(estimates)
    print(f"in all: {total.forwards:.0f} forwards, {total.flops:.2g} FLOPs, {_time(total)}", end="")
    print(f", in {shards} shards" if shards > 1 else "")
    print("a dry run: nothing was run and nothing was written")


def _row(cell: "CellEstimate") -> tuple[str, ...]:
    cost = cell.cost
    return (cell.config, str(cell.chunks), str(cell.samples), f"{cost.forwards:.0f}", f"{cost.flops:.2g}", _time(cost))


def _time(cost: "Estimate") -> str:
    if cost.seconds < 120:
        return f"{cost.seconds:.0f} s"
    return f"{cost.seconds / 60:.0f} min" if cost.seconds < 7200 else f"{cost.seconds / 3600:.1f} h"
