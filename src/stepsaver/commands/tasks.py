"""`stepsaver tasks`: the tasks that we know, how they are scored and which number is their accuracy."""

import argparse
import json

from stepsaver.commands._registry_table import add_json_argument

HELP = "the tasks there are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from stepsaver.evaluation.task_registry import task_declarations

    found = task_declarations()
    if options.json:
        rows = {
            name: {
                "path": each.path,
                "accuracy": each.accuracy,
                "beside": each.beside,
                "also": each.also,
                "summary": each.summary,
            }
            for name, each in found.items()
        }
        print(json.dumps(rows))
        return 0
    width = max(map(len, found))
    for name, each in found.items():
        print(f"{name:<{width}}  {each.path}, accuracy {each.accuracy}  {each.summary}")
        if each.also:
            print(f"{'':<{width}}  also {', '.join(each.also)}")
    print("Any other lm-eval task runs too if its metric is named with --metric.")
    return 0
