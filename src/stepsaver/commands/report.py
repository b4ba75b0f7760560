"""`stepsaver report`: writes the tables of an experiment into its results.md."""

import argparse
from pathlib import Path

from stepsaver.commands._experiment_options import add_cell_arguments, cell_folder, chosen_tasks
from stepsaver.engine.errors import UsageError

HELP = "write the result tables of an experiment into its results.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the tables as CSV instead")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.experiments import find_experiment, read_summaries, results_folder
    from stepsaver.report.results_page import as_csv, update_results

    experiment = find_experiment(options.experiment)
    results = results_folder(experiment, options.model or experiment.spec.model)
    by_task = {
        cell_folder(task, options.limit): list(
            read_summaries(experiment, results, cell_folder(task, options.limit)).values()
        )
        for task in chosen_tasks(options, experiment)
    }
    by_task = {task: summaries for task, summaries in by_task.items() if summaries}
    if not by_task:
        raise UsageError(f"{experiment.name} has no results yet; run it first")
    if options.csv:
        options.csv.write_text(as_csv(experiment, by_task), encoding="utf-8")
        print(options.csv)
    else:
        print(update_results(experiment, by_task))
    return 0
