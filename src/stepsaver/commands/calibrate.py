"""`stepsaver calibrate`: the drift of deltas per layer, age and kind of row, and the layers it proposes to reuse."""

import argparse
import json
from pathlib import Path

from stepsaver.commands._model_options import add_model_arguments, build_engine, open_chosen_model
from stepsaver.commands._outputs import check_output_file
from stepsaver.commands.generate import add_prompt_arguments, read_prompts
from stepsaver.engine.errors import UsageError

MOST_AGE = 4096  # steps: no block has more
PICTURES = (".png", ".pdf", ".svg")
HELP = "drift per layer, age and kind of row"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--max-age", type=int, default=4, metavar="N", help="steps to compare over (default: 4)")
    parser.add_argument("--heat-map", type=Path, metavar="FILE.png", help="also draw the table")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.calibration import calibrate
    from stepsaver.engine.sampling import NonFiniteLogits
    from stepsaver.report.heat_map import write_heat_map

    if not 1 <= options.max_age <= MOST_AGE:
        raise UsageError(f"max age {options.max_age} is not a number of steps from 1 to {MOST_AGE}")
    if options.rule or options.recipe:
        raise UsageError("calibrate measures drift without reuse; leave --rule and --recipe out")
    check_output_file("--heat-map", options.heat_map, PICTURES)
    opened = open_chosen_model(options)
    prompts = read_prompts(options, opened)
    engine = build_engine(options, opened)
    try:
        document = calibrate(engine, prompts, max_new_tokens=options.max_new_tokens, max_age=options.max_age)
    except NonFiniteLogits as error:
        raise UsageError(f"{options.model}: {error}") from None
    if options.heat_map:
        write_heat_map(document, options.heat_map)
    if options.json:
        print(json.dumps(document))
        return 0
    print("layer  attention  mlp   (mean drift of unchanged masked rows, one step)")
    for layer in range(document["layers"] - 1):
        attention, mlp = (document["drift"][part][layer][0][0] for part in ("attention", "mlp"))
        print(f"{layer:>5}  {attention:>9.4f}  {mlp:.4f}")
    print(f"layers that drift least: --rule layer_reuse:k=2,layers={document['calibrated']}")
    return 0
