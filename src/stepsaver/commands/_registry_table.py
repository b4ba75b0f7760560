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
        fields = ", ".join(
            f"{field}={default}" if default is not None else field for field, default in _fields(made).items()
        )
        print(f"{name}({fields})")
        print("  " + (inspect.getdoc(made) or "").replace("\n", "\n  "))


def _fields(made: type) -> dict[str, object]:
    """Field names with their defaults; None where a value has to be given."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(made)
    }
