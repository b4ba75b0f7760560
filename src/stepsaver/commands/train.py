"""`stepsaver train`: trains the embedded model by its recipe."""

import argparse

from stepsaver.commands._outputs import check_output_folder

WHEN_STOPPED = "the last saved step is kept, and the same command with --resume goes on from there"
HELP = "train the embedded model, as its training card says"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from stepsaver.training.options import add_training_arguments

    add_training_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from stepsaver.training.options import run_training

    check_output_folder("--out", options.out)
    check_output_folder("--export", options.export)
    return run_training(options)
