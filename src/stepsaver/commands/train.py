"""`stepsaver train`: the recipe of the embedded model."""

import argparse

HELP = "train the embedded model, as its training card says"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from stepsaver.training.options import add_training_arguments

    add_training_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from stepsaver.training.options import run_training

    return run_training(options)
