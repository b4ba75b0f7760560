"""`stepsaver`: finds the commands, runs one, and turns what a user got wrong into one line and exit code 2."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import NoReturn

from stepsaver import commands
from stepsaver.engine.errors import UsageError

DONE, CHECK_FAILED, WRONG_USE = 0, 1, 2


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` says the rest."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser(command_name: str | None) -> argparse.ArgumentParser:
    """All commands with their help, and the options of the one that is asked for: some need slow imports."""
    parser = OneLineParser(prog="stepsaver", description="Cross-step compute reuse in block-diffusion language models.")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in sorted(each.name for each in iter_modules(commands.__path__) if not each.name.startswith("_")):
        command = import_module(f"{commands.__name__}.{module}")
        sub = chosen.add_parser(module, help=command.HELP, description=command.HELP)
        if module == command_name:
            command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Parses, and takes configs that stand behind options (`run NAME --limit 10 CONFIG`), which argparse does not."""
    options, rest = parser.parse_known_args(given)
    if rest:
        if not isinstance(getattr(options, "configs", None), list) or any(each.startswith("-") for each in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.configs += rest
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        named = next((each for each in given if not each.startswith("-")), None)
        options = parse(build_parser(named), given)
        code: int = options.run(options)
    except UsageError as error:
        print(f"stepsaver: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:  # the reader of our output has gone, as in `stepsaver ... | head`
        sys.stderr.close()
        return DONE
    return code


if __name__ == "__main__":
    sys.exit(main())
