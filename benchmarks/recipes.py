"""Six tunings of the embedded model: limits of 0.5, 1 and 3 points at batch 1 and 32, and their table for the docs.

    python -m benchmarks.recipes [--budget 30min] [--batch-size 1 32] [--max-drop 0.5 1 3]

Each goes to `experiments/recipes/`, from what is stored there on, and takes its budget at most. On a quiet machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measurement import store_measurement

ROOT = Path(__file__).parent.parent
RECIPES, TABLE = ROOT / "experiments" / "recipes", Path(__file__).parent / "measured" / "recipes.json"
TASK = "mini_gsm8k"
COLUMNS = ("recipe", "batch", "limit", "speed-up", "drop (points)", "fresh problems", "tried", "settings")


def folder_of(batch_size: int, max_drop: float) -> Path:
    return RECIPES / f"batch_{batch_size}_drop_{max_drop:g}"


def tune(batch_size: int, max_drop: float, budget: str) -> None:
    command = [sys.executable, "-m", "stepsaver", "tune", "--model", "embedded", "--task", TASK]
    command += ["--batch-size", str(batch_size), "--max-drop", f"{max_drop:g}", "--budget", budget]
    subprocess.run([*command, "--out", str(folder_of(batch_size, max_drop))], cwd=ROOT, check=True)


def row(batch_size: int, max_drop: float) -> tuple[str, ...]:
    path = folder_of(batch_size, max_drop) / "tuning.json"
    first = (path.parent.name, str(batch_size), f"{max_drop:g}")
    if not path.exists():
        return (*first, "not run yet", "-", "-", "-", "-")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    recipe, tried = document["recipe"], str(len(document["candidates"]))
    if recipe is None:
        return (*first, "none", "-", "-", tried, document["sentence"])
    measured = recipe["measured"]
    up, drop = ([measured[name][part] for part in ("value", "low", "high")] for name in ("speed_up", "drop_points"))
    settings = [
        *recipe["rules"],
        recipe.get("policy") or recipe["decode"],
        f"sub-blocks of {recipe['sub_block_size']}",
        f"join {recipe['join']}",
    ]
    return (
        *first,
        f"{up[0]:.2f}x [{up[1]:.2f}, {up[2]:.2f}]",
        f"{drop[0]:+.2f} [{drop[1]:+.2f}, {drop[2]:+.2f}]",
        str(measured["problems"]),
        tried,
        ", ".join(settings),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", default="30min")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--max-drop", type=float, nargs="+", default=[0.5, 1.0, 3.0])
    parser.add_argument("--table", action="store_true", help="write the table of what is there; tune nothing")
    options = parser.parse_args()
    wanted = [(batch_size, max_drop) for batch_size in options.batch_size for max_drop in options.max_drop]
    for batch_size, max_drop in () if options.table else wanted:
        tune(batch_size, max_drop, options.budget)
    rows = [row(*each) for each in wanted]
    store_measurement(TABLE, "python -m benchmarks.recipes", COLUMNS, rows)
    print("\n".join("  ".join(each) for each in rows))


if __name__ == "__main__":
    main()
