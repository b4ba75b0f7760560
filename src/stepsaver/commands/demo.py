"""`stepsaver demo`: the embedded model on a few of its problems, without and with reuse."""

import argparse
import json
import random
from typing import Any

from stepsaver.engine.errors import UsageError

HELP = "decode some problems with the embedded model, without and with reuse"

RULE_SETS: dict[str, tuple[str, ...]] = {
    "no reuse": (),
    "output reuse, k=2": ("layer_reuse:k=2,layers=last,mode=output",),
    "delta reuse of early layers, k=2": ("layer_reuse:k=2,layers=first,mode=delta",),
    "previous row + TRIM": ("previous_row:refresh=block", "trim:level=changed"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", type=int, default=64, metavar="N", help="how many problems (default: 64)")
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="samples decoded together (default: 32)"
    )
    parser.add_argument("--threshold", type=float, default=0.9, metavar="X")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    import torch

    from stepsaver.bench.comparison import Config, compare_configs
    from stepsaver.engine.models.load import load_model
    from stepsaver.evaluation.embedded import DATA_FOLDER
    from stepsaver.evaluation.model_source import resolve_model

    if options.problems < 1:
        raise UsageError(f"{options.problems} problems are too few")
    folder = resolve_model("embedded")
    lines = (DATA_FOLDER / "mini_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in random.Random(0).sample(lines, min(options.problems, len(lines)))]
    model = load_model(folder, dtype=torch.float32)
    policy = f"threshold:threshold={options.threshold}"
    configs = {name: Config(rules, policy) for name, rules in RULE_SETS.items()}
    rows = compare_configs(model, folder, documents, configs, batch_size=options.batch_size)
    if options.json:
        print(json.dumps(rows))
    else:
        _print(rows, documents)
    return 0


def _print(rows: list[dict[str, Any]], documents: list[dict[str, Any]]) -> None:
    print(f"question: {documents[0]['question']}\n")
    for row in rows:
        print(f"{row['config']}:\n  {row['first_answer'].strip()}".replace("\n", "\n  ").rstrip())
    print(f"\n{'config':<34}{'right':>10}{'tokens/s':>10}{'speed-up':>10}{'predicted':>11}{'tokens/step':>13}")
    for row in rows:
        print(
            f"{row['config']:<34}{row['right']:>5}/{row['problems']:<4}{row['tokens_per_s']:>10.1f}"
            f"{row['speed_up']:>9.2f}x{row['predicted_speed_up']:>10.2f}x{row['tokens_per_step']:>13.2f}"
        )
    print("speed-ups: tokens/s against no reuse, medians of interleaved chunks; predicted from the operations executed")
