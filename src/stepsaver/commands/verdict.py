"""`stepsaver verdict`: whether the hypothesis of an experiment holds, from what is stored."""

import argparse
import json
from dataclasses import asdict

from stepsaver.commands._experiment_options import add_cell_arguments, cell_folder, chosen_tasks
from stepsaver.engine.errors import UsageError

HELP = "whether the hypothesis holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.experiments import find_experiment, read_summaries, results_folder
    from stepsaver.bench.verdict import judge
    from stepsaver.report.tables import plain_table, result_rows

    experiment = find_experiment(options.experiment)
    results = results_folder(experiment, options.model or experiment.spec.model)
    documents = {}
    for task in chosen_tasks(options, experiment):
        summaries = list(read_summaries(experiment, results, cell_folder(task, options.limit)).values())
        if not summaries:
            continue
        verdict = judge(summaries, experiment.spec.success)
        documents[task] = asdict(verdict)
        if not options.json:
            print(f"{task}: {verdict.sentence}")
            print(plain_table(result_rows(summaries, verdict)))
    if not documents:
        raise UsageError(f"{experiment.name} has no results yet; run it first")
    if options.json:
        print(json.dumps(documents))
    return 0
