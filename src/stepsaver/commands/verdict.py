"""`stepsaver verdict`: whether the hypothesis of an experiment holds, from what is stored or else committed."""

import argparse
import json
from dataclasses import asdict

from stepsaver.commands._experiment_options import add_cell_arguments, choose

HELP = "whether the hypothesis holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import read_summaries
    from stepsaver.bench.verdict import judge
    from stepsaver.report.tables import plain_table, result_rows

    chosen = choose(options)
    documents = {}
    for task, folder in chosen.cell_folders.items():
        source, summaries = "results", list(read_summaries(chosen.experiment, chosen.results, folder).values())
        if not summaries and (saved := chosen.artifacts(folder)):
            source, summaries = "artifacts", saved.summaries
        if not summaries:
            continue
        verdict = judge(summaries, chosen.experiment.success_of)
        documents[task] = asdict(verdict) | {"source": source}
        if not options.json:
            print(f"{task}{', from artifacts' if source == 'artifacts' else ''}: {verdict.sentence}")
            print(plain_table(result_rows(summaries, verdict)))
    if not documents:
        raise chosen.nothing_there()
    if options.json:
        print(json.dumps(documents))
    return 0
