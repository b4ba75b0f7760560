"""`stepsaver status`: what is done, a tick per config and the samples stored."""

import argparse
import json
from typing import Any

from stepsaver.commands._experiment_options import cell_folder, chosen_tasks

HELP = "what is done of an experiment, or of all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="default: all experiments")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="results of runs with this limit")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.experiments import experiment_names, find_experiment, results_folder
    from stepsaver.bench.store import IDENTITY, SUMMARY, read_cell, read_json

    rows: list[dict[str, Any]] = []
    for name in [options.experiment] if options.experiment else experiment_names():
        experiment = find_experiment(name)
        results = results_folder(experiment, options.model or experiment.spec.model)
        for task in chosen_tasks(options, experiment):
            for config in experiment.configs:
                folder = results / cell_folder(task, options.limit) / config.name
                stored = read_json(folder / IDENTITY) or {}
                samples = {
                    (record.key.task, record.key.document)
                    for record in read_cell(folder, str(stored.get("run_id"))).all_records
                }
                summary = read_json(folder / SUMMARY)
                done = summary is not None and summary["run_id"] == stored.get("run_id")
                rows.append(
                    {"experiment": experiment.name, "task": task, "config": config.name, "done": done}
                    | {"samples": len(samples)}
                )
    if options.json:
        print(json.dumps(rows))
        return 0
    for experiment_name, task in dict.fromkeys((row["experiment"], row["task"]) for row in rows):
        mine = [row for row in rows if (row["experiment"], row["task"]) == (experiment_name, task)]
        print(f"{experiment_name} {cell_folder(task, options.limit)}: {sum(row['done'] for row in mine)}/{len(mine)}")
        for row in mine:
            print(f"  {'✓' if row['done'] else '·'} {row['config']} ({row['samples']} samples)")
    return 0
