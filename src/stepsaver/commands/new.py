"""`stepsaver new`: a new experiment folder from the template, in the `experiments/` of the current folder or in it."""

import argparse
import re

from stepsaver.engine.errors import UsageError

HELP = "a new experiment folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="such as 05_my_idea")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import folder_of_new
    from stepsaver.bench.template import filled_files

    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", options.name):
        raise UsageError(f"{options.name!r} cannot be the name of a folder; use letters, digits, _ and -")
    folder = folder_of_new(options.name)
    if folder.exists():
        raise UsageError(f"{folder} exists already")
    folder.mkdir(parents=True)
    for name, text in filled_files(options.name).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "artifacts").mkdir()
    print(folder)
    return 0
