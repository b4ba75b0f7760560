"""`stepsaver discard`: sets invalid results aside; the reason stays on record."""

import argparse

from stepsaver.commands._experiment_options import add_cell_arguments, choose
from stepsaver.engine.errors import UsageError

HELP = "set invalid results aside, on record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="only these configs (default: all)")
    parser.add_argument("--why", required=True, metavar="REASON", help="what is wrong with them")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.experiment.folders import discard
    from stepsaver.bench.results.locks import exclusive

    if not options.why.strip():
        raise UsageError("--why is empty; a reason has to stay on record")
    experiment, results, cell_folders = choose(options)
    configs = [experiment.config(name).name for name in options.configs] or [each.name for each in experiment.configs]
    with exclusive(results):
        for task, folder in cell_folders.items():
            moved = discard(experiment, results, folder, configs, options.why)
            print(f"{task}: set aside {', '.join(moved)}")
    return 0
