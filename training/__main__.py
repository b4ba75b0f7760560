"""`python -m training`: trains the embedded model, resumes a training, exports a checkpoint."""

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

from stepsaver.cli import OneLineParser, answered
from stepsaver.commands._outputs import check_output_folder
from stepsaver.engine.errors import UsageError, shown
from training.card import write_card
from training.export import export_checkpoint
from training.loop import train
from training.progress import progress_watcher
from training.recipe import Recipe

WHEN_STOPPED = "the last saved step is kept, and the same command with --resume goes on from there"


def main(arguments: list[str] | None = None) -> int:
    return answered(lambda: run_training(training_parser().parse_args(arguments)), lambda: WHEN_STOPPED)


def training_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m training", description="Trains the embedded model, as its card says.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: state and log")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--until", type=int, help="stop after this step, saved")
    parser.add_argument("--export", type=Path, help="afterwards write checkpoint, accuracies and training card here")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    for field in fields(Recipe):
        if field.type in (int, float):
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=field.type, default=field.default, help="default %(default)s")
    parser.add_argument("--rates", type=_rates, default=Recipe().rates, help="the schedule, as step:rate,step:rate")
    return parser


def run_training(options: argparse.Namespace) -> int:
    chosen = {field.name: getattr(options, field.name) for field in fields(Recipe) if hasattr(options, field.name)}
    recipe = replace(Recipe(), **chosen)
    if options.until is not None and options.until < 0:
        raise UsageError(f"--until {options.until} is negative")
    check_output_folder("--out", options.out)
    check_output_folder("--export", options.export)
    with progress_watcher(recipe) as watch:
        run = train(
            options.out,
            recipe,
            resume=options.resume,
            until=options.until,
            compiled=not options.no_compile,
            watch=watch,
        )
    if options.export:
        export_checkpoint(run.model, options.export)
        write_card(options.export, options.out, run)
    return 0


def _rates(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(start), float(rate)) for start, rate in pairs)
    except ValueError:
        raise UsageError(f"--rates {shown(text)} is no schedule such as 0:0.002,500:0.001") from None


if __name__ == "__main__":
    sys.exit(main())
