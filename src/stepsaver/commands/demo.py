"""`stepsaver demo`: the main job on the embedded default, the 3x3 grid of `00_baseline` on word problems."""

import argparse

from stepsaver.commands import report as report_command
from stepsaver.commands import run as run_command

HELP = "the main job on the embedded default: the 3x3 grid of layer reuse on word problems"
EXPERIMENT, TASK = "00_baseline", "mini_gsm8k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=256, metavar="N", help="how many problems (default: 256)")


def run(options: argparse.Namespace) -> int:
    chosen = [EXPERIMENT, "--task", TASK, "--limit", str(options.limit)]
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    run_command.run(parser.parse_args(chosen))
    _report(chosen)
    return 0  # what the audit finds is printed; a busy machine is no reason for a demonstration to fail


def _report(chosen: list[str]) -> None:
    """The pages go to the results, which no commit holds: a demonstration changes no file of the repository."""
    from stepsaver.bench.experiments import find_experiment, results_folder

    parser = argparse.ArgumentParser()
    report_command.add_arguments(parser)
    options = parser.parse_args(chosen)
    experiment = find_experiment(EXPERIMENT)
    results = results_folder(experiment, experiment.spec.model)
    tasks = report_command.read_tasks(options, experiment, results)
    folder = results / tasks[0].folder
    print()
    report_command.write_report(experiment, tasks, page=folder / "report.html", results_page=folder / "results.md")
