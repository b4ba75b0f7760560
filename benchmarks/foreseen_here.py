"""Projections onto this machine beside what was measured on it: how far `stepsaver foresee` can be believed.

    python benchmarks/foreseen_here.py [EXPERIMENT ...]

Reads what is stored of experiments, or their committed artifacts, and stores the table that docs/speed.md quotes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from stepsaver.bench.machine.measurement import store_measurement

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "measured" / "foreseen_here.json"
COLUMNS = ("experiment", "task", "config", "projected here", "measured", "projected / measured")


def rows_of(experiment: str) -> list[tuple[str, ...]]:
    command = [sys.executable, "-m", "stepsaver", "foresee", experiment, "--on", "here", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [
        (
            experiment,
            task,
            each["config"],
            f"{each['projected']:.2f}",
            f"{each['measured']:.2f}",
            f"{each['projected'] / each['measured']:.2f}",
        )
        for task, found in json.loads(done.stdout)["tasks"].items()
        for each in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("experiments", nargs="*", default=["05_near_rows", "06_batch_1"])
    options = parser.parse_args()
    rows = [row for experiment in options.experiments for row in rows_of(experiment)]
    store_measurement(TABLE, "python benchmarks/foreseen_here.py", COLUMNS, rows)
    print("\n".join("  ".join(each) for each in rows))


if __name__ == "__main__":
    main()
