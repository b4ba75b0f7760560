"""Projections of `stepsaver foresee`: onto this machine beside what was measured on it, which says how far they can be
believed, and of the 7B shape onto GPUs, for the proposals of the experiments that need one.

    python benchmarks/foreseen.py

Reads what is stored of experiments, or their committed artifacts, and stores the tables that the documents quote.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepsaver.bench.machine.measurement import store_measurement

ROOT = Path(__file__).parent.parent
MEASURED = Path(__file__).parent / "measured"
COMMAND = "python benchmarks/foreseen.py"
HERE = ("05_near_rows", "06_batch_1")
GPUS = ("rtx6000", "a100", "h100")
FROM_7B = {1: ("00_baseline", "06_batch_1"), 16: ("00_baseline", "05_near_rows")}  # by batch size
TASKS_7B = ("mini_gsm8k", "mini_gsm8k_large")


def foreseen(experiment: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    """The projections of an experiment, by task."""
    command = [sys.executable, "-m", "stepsaver", "foresee", experiment, *options, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tasks"]


def here(experiments: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        (
            experiment,
            task,
            each["config"],
            f"{each['projected']:.2f}",
            f"{each['measured']:.2f}",
            f"{each['projected'] / each['measured']:.2f}",
        )
        for experiment in experiments
        for task, found in foreseen(experiment, "--on", "here").items()
        for each in found
    ]


def of_7b(batch: int, experiments: Sequence[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for experiment in experiments:
        options = ("--model-shape", "7B", "--on", ",".join(GPUS), "--batch", str(batch))
        for task, found in foreseen(experiment, *options).items():
            projected = {(each["config"], each["device"]): each["projected"] for each in found}
            for config in dict.fromkeys(each["config"] for each in found) if task in TASKS_7B else ():
                rows.append((f"{experiment}, {config}", *(f"{projected[config, gpu]:.2f}" for gpu in GPUS)))
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    columns: tuple[str, ...] = (
        "experiment", "task", "config", "projected here", "measured", "projected / measured",
    )  # fmt: skip
    tables = {"foreseen_here": (columns, here(HERE))}
    for batch, experiments in FROM_7B.items():
        columns = ("steps counted in", *(f"projected, {gpu}" for gpu in GPUS))
        tables[f"foreseen_7b_batch_{batch}"] = (columns, of_7b(batch, experiments))
    for name, (columns, rows) in tables.items():
        store_measurement(MEASURED / f"{name}.json", COMMAND, columns, rows)
        print(name, *("  ".join(each) for each in rows), sep="\n")


if __name__ == "__main__":
    main()
