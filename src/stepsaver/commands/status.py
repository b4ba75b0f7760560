"""`stepsaver status`: what is done, with a check mark and the stored samples of each config; and the jobs at work."""

import argparse
import json
from pathlib import Path
from typing import Any

from stepsaver.commands._experiment_options import Chosen, choose

HELP = "what is done of an experiment, or of all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="default: all experiments")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="results of runs with this limit")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import experiment_names, logs_folder
    from stepsaver.bench.jobs import job_states

    names = [options.experiment] if options.experiment else experiment_names()
    chosen = [choose(options, name) for name in names]
    rows = [row for each in chosen for row in _rows(each)]
    jobs = [
        (each.experiment.name, job)
        for each in chosen
        for job in job_states(logs_folder(each.experiment))
        if job.is_live or job.states is None
    ]
    if options.json:
        queued = [{"experiment": name, **job._asdict(), "results": str(job.results)} for name, job in jobs]
        print(json.dumps({"cells": rows, "jobs": queued}))
        return 0
    for experiment, folder in dict.fromkeys((row["experiment"], row["folder"]) for row in rows):
        mine = [row for row in rows if (row["experiment"], row["folder"]) == (experiment, folder)]
        from_artifacts = ", from artifacts" if mine[0]["source"] == "artifacts" else ""
        print(f"{experiment} {folder}: {sum(row['done'] for row in mine)}/{len(mine)}{from_artifacts}")
        for row in mine:
            print(f"  {'✓' if row['done'] else '·'} {row['config']} ({row['samples']} samples)")
    for name, job in jobs:
        print(f"{name} {job}")
    return 0


def _rows(chosen: Chosen) -> list[dict[str, Any]]:
    return [
        {"experiment": chosen.experiment.name, "task": task, "folder": folder, "config": config} | state
        for task, folder in chosen.cell_folders.items()
        for config, state in _states(chosen, folder).items()
    ]


def _states(chosen: Chosen, folder: str) -> dict[str, dict[str, Any]]:
    """Returns, by config, what is stored of a task, or else what was committed of it."""
    names = [config.name for config in chosen.experiment.configs]
    stored = {name: _state(chosen.results / folder / name) | {"source": "results"} for name in names}
    if any(state["samples"] or state["done"] for state in stored.values()):
        return stored
    saved = chosen.artifacts(folder)
    if saved is None:
        return stored
    return {
        each.name: {
            "done": each.summary is not None,
            "samples": each.summary.samples if each.summary else 0,
            "source": "artifacts",
        }
        for each in saved.cells
    }


def _state(folder: Path) -> dict[str, Any]:
    """Whether a config is done, and how many of its samples are stored, those in unmerged shards included."""
    from stepsaver.bench.shards import stored_with_shards
    from stepsaver.bench.store import SUMMARY, read_summary

    cells = stored_with_shards(folder)
    samples = {(record.key.task, record.key.document) for cell in cells for record in cell.all_records}
    summary = read_summary(folder / SUMMARY)
    return {"done": bool(cells) and summary is not None and summary.run_id == cells[0].run_id, "samples": len(samples)}
