"""`stepsaver models`: the architectures that load, and the model that ships with the package."""

import argparse
import json

from stepsaver.commands._registry_table import add_json_argument

HELP = "the architectures that load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from stepsaver.engine.models.architecture import architectures
    from stepsaver.evaluation.embedded import MODEL_FOLDER

    found = architectures()
    embedded = (MODEL_FOLDER / "config.json").exists()
    if options.json:
        print(json.dumps({"architectures": {k: asdict(v) for k, v in found.items()}, "embedded": embedded}))
        return 0
    for name, architecture in found.items():
        size = architecture.block_size
        rows = "as config.json or --block-size says" if size is None else f"of {size}"
        print(f"{name}: blocks {rows}" + (" (autoregressive)" if size == 1 else ""))
    print(f"--model embedded: {'the model that ships with the package' if embedded else 'not in this package'}")
    return 0
