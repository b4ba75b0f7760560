"""A registry as a table for people or JSON for programs."""

import argparse
import dataclasses
import inspect
import json

from stepsaver.engine import registry


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_registry(package: str, *, as_json: bool) -> None:
    found = registry.found_in(package)
    if as_json:
        print(
            json.dumps({name: {"fields": _fields(made), "about": inspect.getdoc(made)} for name, made in found.items()})
        )
        return
    for name, made in found.items():
        print(f"{name}({', '.join(map(_field_text, dataclasses.fields(made)))})")
        print("  " + (inspect.getdoc(made) or "").replace("\n", "\n  "))


def _field_text(field: dataclasses.Field) -> str:
    """As it is written on a command line; a name alone where a value has to be given."""
    return field.name if field.default is dataclasses.MISSING else f"{field.name}={registry.value_text(field.default)}"


def _fields(made: type) -> dict[str, object]:
    """Field names with their defaults; None where a value has to be given."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(made)
    }
