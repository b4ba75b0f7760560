"""`stepsaver audit`: whether the results of an experiment can be trusted; without results, what was found when they
were saved as artifacts.
"""

import argparse
import json
from dataclasses import asdict

from stepsaver.commands._experiment_options import add_cell_arguments, choose

HELP = "whether results can be trusted; exit code 1 if anything is invalid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.audit import CHECKS, audit, read_evidence

    chosen = choose(options)
    read = [read_evidence(chosen.experiment, chosen.results, folder) for folder in chosen.cell_folders.values()]
    audited = [each for each in read if each.has_results]
    saved = [found for each in read if not each.has_results and (found := chosen.artifacts(each.task))]
    if not audited and not saved:
        raise chosen.nothing_there()
    findings = [(each.task, "results", finding) for each in audited for finding in audit(each)]
    findings += [(each.folder, "artifacts", finding) for each in saved for finding in each.findings]
    if options.json:
        print(json.dumps([{"task": task, "source": source, **asdict(each)} for task, source, each in findings]))
    else:
        for task, _, finding in findings:
            print(f"{finding.level:<8} {task}: {finding.message} [{finding.check}]")
        invalid = sum(finding.level == "invalid" for _, _, finding in findings)
        tasks, remarks = len(audited) + len(saved), len(findings) - invalid
        print(f"{len(CHECKS)} checks on {tasks} tasks: {invalid} invalid, {remarks} remarks")
        if saved:
            names = ", ".join(each.folder for each in saved)
            print(f"from artifacts: {names}: as found when they were saved; checking again needs the results")
    return 1 if any(finding.level == "invalid" for _, _, finding in findings) else 0
