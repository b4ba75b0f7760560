"""`stepsaver policies`: every policy there is, with its fields and what it does."""

import argparse

from stepsaver.commands._registry_table import add_json_argument, print_registry

HELP = "the decode policies there are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    print_registry("stepsaver.engine.policies", as_json=options.json)
    return 0
