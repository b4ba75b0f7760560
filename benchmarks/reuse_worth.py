"""What every rule is worth on the embedded word problems: accuracy and speed, paired and interleaved.

The first configuration is the baseline. Controls at equal speed (lower thresholds, factor, output reuse, random rows)
say whether a rule beats doing nothing clever.
"""

import argparse
import json
import random
from pathlib import Path

import torch

from benchmarks.comparison import Config, compare_configs
from stepsaver.engine.models.load import load_model
from stepsaver.evaluation.embedded import DATA_FOLDER
from stepsaver.evaluation.model_source import resolve_model


def configurations() -> dict[str, Config]:
    configs = {"baseline": Config()}
    for mode in ("output", "delta", "mlp"):
        for layers in ("first", "middle", "last"):
            for k in (2, 3):
                configs[f"{mode} k{k}_{layers}"] = Config((f"layer_reuse:k={k},layers={layers},mode={mode}",))
    configs["delta k2_first freeze"] = Config(("layer_reuse:k=2,layers=first,mode=delta,kv=freeze",))
    for refresh in ("sub-block", "block", "drift"):
        configs[f"window {refresh}"] = Config((f"window:refresh={refresh}",))
    for level in ("structural", "drift", "changed"):
        configs[f"trim {level}"] = Config((f"trim:level={level}",))
    for threshold in (0.05, 0.1, 0.2):
        configs[f"adaptive_layers {threshold}"] = Config((f"adaptive_layers:threshold={threshold}",))
    for refresh in ("sub-block", "block"):
        for level in ("structural", "drift", "changed"):
            rules = (f"window:refresh={refresh}", f"trim:level={level}")
            configs[f"window {refresh} + trim {level}"] = Config(rules)
    window = ("window:refresh=block", "trim:level=changed")
    configs["window + trim + delta k2_first"] = Config((*window, "layer_reuse:k=2,layers=first,mode=delta"))
    configs["window + trim + mlp k2_first"] = Config((*window, "layer_reuse:k=2,layers=first,mode=mlp"))
    bound = ("window:refresh=block", "trim:level=changed,settle=0")  # the rows that must run, and no other
    configs["bound: changed and read rows"] = Config(bound)
    configs["bound: and mlp k3_all"] = Config((*bound, "layer_reuse:k=3,layers=all,mode=mlp"))
    configs["window + trim + adaptive_steps"] = Config(window, "adaptive_steps:margin=0.3,max_rows=2")
    for threshold in (0.8, 0.7, 0.5):
        configs[f"control: threshold {threshold}"] = Config((), f"threshold:threshold={threshold}")
    configs["control: factor 0.5"] = Config((), "factor:factor=0.5")
    configs["control: factor 1"] = Config((), "factor:factor=1.0")
    configs["control: output 2"] = Config(("layer_reuse:k=2,mode=output",))
    for budget in (2, 4):
        rules = ("window:refresh=block", f"trim:level=random,budget={budget}")
        configs[f"control: window + trim random {budget}"] = Config(rules)
    configs["control: adaptive_steps"] = Config((), "adaptive_steps:margin=0.3,max_rows=2")
    return configs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", action="append", help="configurations whose name contains this; may be repeated")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    options = parser.parse_args()
    folder = resolve_model("embedded")
    lines = (DATA_FOLDER / "mini_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in random.Random(0).sample(lines, min(options.problems, len(lines)))]
    configs = {
        name: config
        for name, config in configurations().items()
        if name == "baseline" or not options.only or any(part in name for part in options.only)
    }
    model = load_model(folder, dtype=torch.float32)
    rows = compare_configs(model, folder, documents, configs, batch_size=options.batch_size)
    print("| config | right | tokens/s | speed-up | per sample | predicted | tokens/step |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['config']} | {row['right'] / row['problems']:.1%} | {row['tokens_per_s']:.0f} "
            f"| {row['speed_up']:.2f} | {row['speed_up_per_sample']:.2f} | {row['predicted_speed_up']:.2f} "
            f"| {row['tokens_per_step']:.2f} |"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
