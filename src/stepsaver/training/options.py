"""The flags of a training on the command line: `stepsaver train` and `python -m stepsaver.training`."""

import argparse
from dataclasses import fields, replace
from pathlib import Path

from stepsaver.engine.errors import UsageError, shown
from stepsaver.training.card import write_card
from stepsaver.training.export import export_checkpoint
from stepsaver.training.loop import train
from stepsaver.training.progress import progress_watcher
from stepsaver.training.recipe import Recipe


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_training(options: argparse.Namespace) -> int:
    chosen = {field.name: getattr(options, field.name) for field in fields(Recipe) if hasattr(options, field.name)}
    recipe = replace(Recipe(), **chosen)
    if options.until is not None and options.until < 0:
        raise UsageError(f"--until {options.until} is negative")
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
