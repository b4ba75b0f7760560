"""`stepsaver audit`: whether the stored results of an experiment can be trusted."""

import argparse
import json

from stepsaver.commands._experiment_options import add_cell_arguments, choose

HELP = "whether results can be trusted; exit code 1 if anything is invalid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.audit import CHECKS, audit, read_task

    chosen = choose(options)
    read = [read_task(chosen.experiment, chosen.results, folder) for folder in chosen.cell_folders.values()]
    audited = [each for each in read if each.cells]
    if not audited:
        raise chosen.nothing_there()
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
