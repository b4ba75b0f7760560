"""All commands with their flags as Markdown, from what their own parsers say."""

import argparse
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from stepsaver import commands

BEGIN, END = "<!-- commands -->", "<!-- /commands -->"


def command_reference() -> str:
    """Returns a section per command: what it does and a table of what it takes."""
    names = sorted(each.name for each in iter_modules(commands.__path__) if not each.name.startswith("_"))
    return "\n\n".join(part for name in names for part in _section(name))


def _section(name: str) -> Iterator[str]:
    command = import_module(f"{commands.__name__}.{name}")
    parser = argparse.ArgumentParser(prog=f"stepsaver {name}", add_help=False)
    command.add_arguments(parser)
    yield f"## stepsaver {name}"
    yield _sentence(command.HELP)
    rows = [
        f"| {_called(action)} | {_explained(parser, action)} |"
        for action in parser._actions  # the one list of arguments that argparse has
        if action.help is not argparse.SUPPRESS
    ]
    if rows:
        yield "\n".join(["| argument | |", "|---|---|", *rows])


def _called(action: argparse.Action) -> str:
    """Returns an argument as it is typed: its names and its value."""
    value = "" if action.nargs == 0 else _value_name(action)
    if not action.option_strings:
        return f"`{value}`" + (" ..." if action.nargs in ("*", "+") else "")
    return ", ".join(f"`{f'{option} {value}'.strip()}`" for option in action.option_strings)


def _value_name(action: argparse.Action) -> str:
    if action.metavar:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _explained(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
    text = (action.help or "") % (values | {"prog": parser.prog})
    required = "required" if action.required and action.option_strings else ""
    return "; ".join(filter(None, [text, required])).replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
