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
    from stepsaver.bench.durable import exclusive
    from stepsaver.bench.folders import discard, stored_configs

    if not options.why.strip():
        raise UsageError("--why is empty; a reason has to stay on record")
    experiment, results, cell_folders = choose(options)
    configs = [experiment.config(name).name for name in options.configs] or [each.name for each in experiment.configs]
    with exclusive(results):
        there = {task: stored_configs(results / folder, configs) for task, folder in cell_folders.items()}
        found = {name for names in there.values() for name in names}
        missing = [name for name in options.configs if name not in found]
        if missing or not found:
            raise UsageError(f"nothing of {', '.join(missing) or experiment.name} to discard in {results}")
        for task, names in there.items():
            if names:
                discard(experiment, results, cell_folders[task], names, options.why)
                print(f"{task}: set aside {', '.join(names)}")
    return 0
