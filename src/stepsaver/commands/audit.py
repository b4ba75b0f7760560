"""`stepsaver audit`: whether the stored results of an experiment can be trusted."""

import argparse
import json

from stepsaver.commands._experiment_options import add_cell_arguments, cell_folder, chosen_tasks
from stepsaver.engine.errors import UsageError

HELP = "whether results can be trusted; exit code 1 if anything is invalid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.audit import CHECKS, audit, read_task
    from stepsaver.bench.experiments import find_experiment, results_folder

    experiment = find_experiment(options.experiment)
    results = results_folder(experiment, options.model or experiment.spec.model)
    audited = [
        read_task(experiment, results, cell_folder(task, options.limit)) for task in chosen_tasks(options, experiment)
    ]
    audited = [each for each in audited if each.cells]
    if not audited:
        raise UsageError(f"{experiment.name} has no results yet; run it first")
    findings = [(each.task, finding) for each in audited for finding in audit(each)]
    if options.json:
        rows = [{"task": task, "level": f.level, "check": f.check, "message": f.message} for task, f in findings]
        print(json.dumps(rows))
    else:
        for task, finding in findings:
            print(f"{finding.level:<8} {task}: {finding.message} [{finding.check}]")
        invalid = sum(finding.level == "invalid" for _, finding in findings)
        print(f"{len(CHECKS)} checks on {len(audited)} tasks: {invalid} invalid, {len(findings) - invalid} remarks")
    return 1 if any(finding.level == "invalid" for _, finding in findings) else 0
