"""The options that commands on an experiment share."""

import argparse
from typing import TYPE_CHECKING

from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.bench.spec import Experiment


def add_cell_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name under experiments/, or a folder")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N samples of each (sub)task")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")


def chosen_tasks(options: argparse.Namespace, experiment: "Experiment") -> tuple[str, ...]:
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"limit {options.limit} is not positive")
    return tuple(options.task or experiment.spec.tasks)


def cell_folder(task: str, limit: int | None) -> str:
    return task + (f"_limit_{limit}" if limit is not None else "")
