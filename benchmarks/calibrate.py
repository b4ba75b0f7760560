"""Drift of deltas without reuse: per layer, age and kind of position, and the layers that it proposes to reuse.

python -m benchmarks.calibrate --prompts FILE.jsonl [--model M] [--heat-map FILE.png]
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.drift import calibrate
from benchmarks.heat_map import write_heat_map
from stepsaver.cli import NOTHING_KEPT, OneLineParser, answered
from stepsaver.commands._model_options import add_model_arguments, build_engine, open_chosen_model
from stepsaver.commands._outputs import check_output_file
from stepsaver.commands.generate import add_prompt_arguments, read_prompts
from stepsaver.engine.errors import UsageError

MOST_AGE = 4096  # steps: no block has more


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m benchmarks.calibrate", description=(__doc__ or "").splitlines()[0])
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--max-age", type=int, default=4, metavar="N", help="steps to compare over (default: 4)")
    parser.add_argument("--heat-map", type=Path, metavar="FILE.png", help="also draw the table")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.max_age <= MOST_AGE:
        raise UsageError(f"max age {options.max_age} is not a number of steps from 1 to {MOST_AGE}")
    if options.rule or options.recipe:
        raise UsageError("drift is measured without reuse; leave --rule and --recipe out")
    check_output_file("--heat-map", options.heat_map, (".png", ".pdf", ".svg"))
    opened = open_chosen_model(options)
    prompts = read_prompts(options, opened)
    engine = build_engine(options, opened)
    with opened.blamed():
        document = calibrate(engine, prompts, max_new_tokens=options.max_new_tokens, max_age=options.max_age)
    if options.heat_map:
        write_heat_map(document, options.heat_map)
    if options.json:
        print(json.dumps(document))
        return 0
    print("layer  attention  mlp   (mean drift of unchanged masked positions, one step)")
    for layer in range(document["layers"] - 1):
        attention, mlp = (document["drift"][part][layer][0][0] for part in ("attention", "mlp"))
        print(f"{layer:>5}  {attention:>9.4f}  {mlp:.4f}")
    print(f"layers that drift least: --rule layer_reuse:k=2,layers={document['calibrated']}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    return answered(lambda: run(parse(arguments)), lambda: NOTHING_KEPT)


if __name__ == "__main__":
    sys.exit(main())
