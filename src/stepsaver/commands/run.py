"""`stepsaver run`: runs what is missing of an experiment, prints the table and the verdict."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.commands._experiment_options import add_cell_arguments, cell_folder, chosen_tasks
from stepsaver.commands._progress import counting_progress

if TYPE_CHECKING:
    from stepsaver.bench.run import RunOptions
    from stepsaver.bench.spec import Experiment

HELP = "run what is missing of an experiment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="only these configs (default: all)")
    parser.add_argument(
        "--force", action="store_true", help="set aside what is stored of the chosen configs, run again"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run; write nothing")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="local files instead of the hub")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run the model's code")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness draws bars of its own, also where there is no terminal
    from stepsaver.bench.experiments import find_experiment
    from stepsaver.bench.run import RunOptions, run_experiment
    from stepsaver.bench.verdict import judge
    from stepsaver.report.tables import plain_table, result_rows

    experiment = find_experiment(options.experiment)
    tasks = chosen_tasks(options, experiment)
    configs = tuple(map(experiment.config, options.configs)) or experiment.configs
    for remark in experiment.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if options.dry_run:
        for task in tasks:
            print(f"{task}: {', '.join(config.name for config in configs)}")
        return 0
    request = RunOptions(
        tasks=tasks,
        configs=configs,
        model=options.model or experiment.spec.model,
        limit=options.limit,
        force=options.force,
        data_dir=options.data_dir,
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )
    with counting_progress("running") as progress:
        found = run_experiment(experiment, request, progress)
    if options.json:
        print(json.dumps(found, default=str))
        return 0
    for task, summaries in found.items():
        verdict = judge(summaries, experiment.spec.success)
        print(f"\n{experiment.name}, {task}, {summaries[0]['samples']} samples: {experiment.spec.question}\n")
        print(plain_table(result_rows(summaries, verdict)))
        for line in _inert_lines(summaries):
            print(line)
        print(f"\n{verdict.sentence}")
    return _audit(experiment, request)


def _inert_lines(summaries: list[dict[str, Any]]) -> list[str]:
    """The configs whose rules cannot act on the task, by name and with the reason."""
    return [
        f"inert: {summary['config']}: {each['rule']}: {each['reason']}"
        + (f"; taken over from {summary['equal_to']}" if summary["equal_to"] else "")
        for summary in summaries
        for each in summary["inert_rules"]
    ]


def _audit(experiment: "Experiment", request: "RunOptions") -> int:
    """Says what is wrong with the results at the end of every run."""
    from stepsaver.bench.audit import audit, read_task
    from stepsaver.bench.experiments import results_folder

    results = results_folder(experiment, request.model)
    is_invalid = False
    for task in request.tasks:
        for finding in audit(read_task(experiment, results, cell_folder(task, request.limit))):
            print(f"audit, {finding.level}: {finding.message} [{finding.check}]")
            is_invalid |= finding.level == "invalid"
    return 1 if is_invalid else 0
