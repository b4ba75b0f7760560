"""`stepsaver demo`: the main job on the embedded default, the 3x3 grid of `00_baseline` on word problems."""

import argparse

from stepsaver.commands import run as run_command

HELP = "the main job on the embedded default: the 3x3 grid of layer reuse on word problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=96, metavar="N", help="how many problems (default: 96)")


def run(options: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    run_command.run(parser.parse_args(["00_baseline", "--task", "mini_gsm8k", "--limit", str(options.limit)]))
    return 0  # what the audit finds is printed; a busy machine is no reason for a demonstration to fail
