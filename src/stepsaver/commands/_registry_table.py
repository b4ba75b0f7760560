"""A registry as a table for people or JSON for programs."""

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

from stepsaver.engine import registry


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def print_registry(package: str, *, as_json: bool, more: Callable[[type], dict[str, Any]] | None = None) -> None:
    """Prints a registry. `more` returns further facts about an entry by label: a text, or a list with a line each."""
    found = {name: (made, more(made) if more else {}) for name, made in registry.all_of(package).items()}
    if as_json:
        documents = {
            name: {"fields": _fields(made), "about": inspect.getdoc(made)} | facts
            for name, (made, facts) in found.items()
        }
        print(json.dumps(documents))
        return
    for name, (made, facts) in found.items():
        print(f"{name}({', '.join(map(_field_text, dataclasses.fields(made)))})")
        for label, content in facts.items():
            for line in [content] if isinstance(content, str) else content:
                print(f"  {label}: {line}")
        print("  " + (inspect.getdoc(made) or "").replace("\n", "\n  "))


def _field_text(field: dataclasses.Field) -> str:
    """Returns a field as it is written on a command line; its name alone if a value has to be given."""
    return field.name if field.default is dataclasses.MISSING else f"{field.name}={registry.value_text(field.default)}"


def _fields(made: type) -> dict[str, object]:
    """Returns field names with their defaults; None if a value has to be given."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(made)
    }
