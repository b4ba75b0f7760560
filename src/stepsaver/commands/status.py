"""`stepsaver status`: what is done, a line per experiment, and the jobs at work."""

import argparse
import json
from pathlib import Path
from typing import Any

from stepsaver.commands._experiment_options import Chosen, choose

HELP = "what is done of an experiment, or of all"
WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help="default: all experiments")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="results of runs with this limit")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")
    parser.add_argument("--wide", action="store_true", help="every config on every task, with its stored samples")
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
    for each in chosen:
        mine = [row for row in rows if row["experiment"] == each.experiment.name]
        for line in _wide(mine) if options.wide else [_short(each.experiment.name, mine)]:
            print(line)
    for name, job in jobs:
        print(f"{name} {job}")
    return 0


def _short(experiment: str, rows: list[dict[str, Any]]) -> str:
    """Returns how much is done of all, and of each task that is begun or not done; cut to the width of a terminal."""
    done, saved = sum(row["done"] for row in rows), any(row["source"] == "artifacts" for row in rows)
    line = f"{experiment:<28} {f'{done}/{len(rows)}':>7} configs{', from artifacts' if saved else ''}"
    folders = dict.fromkeys(row["folder"] for row in rows)
    of_task = {folder: [row["done"] for row in rows if row["folder"] == folder] for folder in folders}
    if 0 < done < len(rows):
        line += ": " + ", ".join(f"{folder} {sum(each)}/{len(each)}" for folder, each in of_task.items())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _wide(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for folder in dict.fromkeys(row["folder"] for row in rows):
        mine = [row for row in rows if row["folder"] == folder]
        from_artifacts = ", from artifacts" if mine[0]["source"] == "artifacts" else ""
        done = f"{sum(row['done'] for row in mine)}/{len(mine)}"
        lines.append(f"{mine[0]['experiment']} {folder}: {done}{from_artifacts}")
        lines += [f"  {'✓' if row['done'] else '·'} {row['config']} ({row['samples']} samples)" for row in mine]
    return lines


def _rows(chosen: Chosen) -> list[dict[str, Any]]:
    return [
        {"experiment": chosen.experiment.name, "task": task, "folder": folder, "config": config} | state
        for task, folder in chosen.cell_folders.items()
        for config, state in _states(chosen, folder).items()
    ]


def _states(chosen: Chosen, folder: str) -> dict[str, dict[str, Any]]:
    """Returns, by config, what is stored of a task, or else what was committed of it."""
    names = [config.name for config in chosen.experiment.configs_on(folder)]
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
    """Whether a config is done, and how many of its samples are stored."""
    from stepsaver.bench.store import SUMMARY, read_cell_files, read_run, read_summary

    stored, summary = read_run(folder), read_summary(folder / SUMMARY)
    if stored is None:
        return {"done": False, "samples": 0}
    records = read_cell_files(folder, stored.run_id).all_records
    samples = {(record.key.task, record.key.document) for record in records}
    return {"done": summary is not None and summary.run_id == stored.run_id, "samples": len(samples)}
