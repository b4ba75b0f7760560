"""How near the steps of large shapes come to what the machine can do, and the memory that they take: runs
`benchmarks.speed` for several shapes and stores the table that benchmarks/README.md quotes.

    python -m benchmarks.limits [--shape 135M 1.5B 7B]

A shape that is not asked for keeps the rows that are stored of it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measurement import read_measurement, store_measurement

TABLE = Path(__file__).parent / "measured" / "limits.json"
COLUMNS = (
    "shape, batch",
    "kind of step",
    "without rules, ms",
    "share of the limit",
    "with suffix dropout and partial commits, ms",
    "share of the limit",
    "limit by",
)
# batch sizes, new tokens and repeats
SHAPES = {"135M": ((1, 8), 64, 5), "1.5B": ((1, 8), 32, 2), "7B": ((1,), 32, 1)}


def measured(shape: str) -> list[tuple[str, ...]]:
    batches, new_tokens, repeats = SHAPES[shape]
    command = [sys.executable, "-m", "benchmarks.speed", "--shape", shape, "--json"]
    command += [part for batch in batches for part in ("--batch-size", str(batch))]
    command += ["--new-tokens", str(new_tokens), "--repeats", str(repeats)]
    document = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    machine = document["machine"]
    read, multiplied = machine["bytes_per_s"] / 1e9, machine["flops_per_s"] / 1e9
    rows = [row for each in document["efficiency"] for row in _steps(shape, each)]
    peak = max(each["peak_memory_bytes"] for each in document["efficiency"]) / 1e9
    summary = f"{shape}: reads {read:.1f} GB/s, multiplies {multiplied:.0f} GFLOP/s; {peak:.1f} GB of memory at most"
    return [*rows, (summary, *[""] * (len(COLUMNS) - 1))]


def _steps(shape: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    name = f"{shape}, {found['batch']}"
    plain, ruled = found["steps"], found["steps_with_rules"]
    rows = []
    for kind in dict.fromkeys((*plain, *ruled)):
        limit = (plain.get(kind) or ruled[kind])["limited_by"]
        rows.append((name, kind, *_figures(plain.get(kind)), *_figures(ruled.get(kind)), limit))
    rates = (found[each]["middle"] for each in ("tokens_per_s", "tokens_per_s_with_rules"))
    plain_rate, ruled_rate = (f"{rate:.3g} tokens/s" for rate in rates)
    return [*rows, (name, "whole decodes", plain_rate, "", ruled_rate, "", "")]


def _figures(step: dict[str, Any] | None) -> tuple[str, str]:
    if step is None:
        return "-", "-"
    return f"{step['milliseconds']:.1f}", f"{step['limit_milliseconds'] / step['milliseconds']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    options = parser.parse_args()
    stored = read_measurement(TABLE)
    for shape in options.shape:
        kept = [row for row in (stored.rows if stored else ()) if not row[0].startswith((f"{shape},", f"{shape}:"))]
        store_measurement(TABLE, "python -m benchmarks.limits", COLUMNS, [*kept, *measured(shape)])
        stored = read_measurement(TABLE)
    assert stored is not None
    print("\n".join("  ".join(row) for row in stored.rows))


if __name__ == "__main__":
    main()
