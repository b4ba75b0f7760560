"""Finds frozen dataclasses by name in a folder, one per file, and makes them from `name:field=value,field=value`.

A new rule or policy is a new file with a dataclass that declares `name`; nothing else has to change. Other packages
declare theirs as entry points (`plugins.py`).
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, cast

from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.plugins import load_plugin, plugin_names, plugin_problem


@cache
def found_in(package_name: str) -> dict[str, type]:
    """All dataclasses with a `name` in one of our packages, by that name."""
    package = import_module(package_name)
    found: dict[str, type] = {}
    for module in sorted(each.name for each in iter_modules(package.__path__)):
        for value in vars(import_module(f"{package_name}.{module}")).values():
            if not isinstance(value, type) or value.__module__ != f"{package_name}.{module}":
                continue  # a class of another package may be imported there
            if dataclasses.is_dataclass(value) and "name" in vars(value):
                known = found.setdefault(vars(value)["name"], value)
                assert known is value, f"two classes named {vars(value)['name']}"
    return found


def all_of(package_name: str) -> dict[str, type]:
    """Our classes and those of other packages, by name."""
    others = plugin_names(_group(package_name))
    return found_in(package_name) | {name: _plugin(package_name, name) for name in sorted(others)}


_adopted: dict[str, dict[str, type]] = {}


def adopt(made: type, kinds: str) -> None:
    """Registers a class from Python code, so that it is found by its name in this process.

    A class that is defined again under the same name, as in a notebook, replaces the one before.
    """
    package_name = f"stepsaver.engine.{kinds}"
    name = str(vars(made).get("name"))
    is_declared = name in plugin_names(_group(package_name))
    known = _plugin(package_name, name) if is_declared else found_in(package_name).get(name)
    if known is made:
        return
    if known is not None:
        raise UsageError(f"{made.__name__} has the name {name!r}, which another one of the {kinds} has")
    if not is_identified(made, name):
        raise UsageError(f"{made.__name__} is not a frozen dataclass with a `name` of its own: no result can name it")
    _adopted.setdefault(package_name, {})[name] = made


def is_identified(made: object, name: str) -> bool:
    """Whether `made` is a frozen dataclass with this name: then its name and fields say what its objects do."""
    if not (isinstance(made, type) and dataclasses.is_dataclass(made) and vars(made).get("name") == name):
        return False
    return bool(made.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _find(package_name: str, kind: str, name: str) -> type:
    if name in _adopted.get(package_name, {}):
        return _adopted[package_name][name]
    known, others = found_in(package_name), plugin_names(_group(package_name))
    if name in others:
        return _plugin(package_name, name)
    if name not in known:
        raise unknown_name(kind, name, known.keys() | others)
    return known[name]


def _plugin(package_name: str, name: str) -> type:
    group = _group(package_name)
    made = load_plugin(group, name, own=found_in(package_name))
    if not is_identified(made, name):
        raise plugin_problem(group, name, f"a frozen dataclass with the name {name!r}")
    return cast(type, made)


def _group(package_name: str) -> str:
    """The entry-point group for one of our packages."""
    return f"stepsaver.{package_name.rpartition('.')[2]}"


def parse(text: str, package_name: str, kind: str) -> Any:
    """Makes an instance from its text. An unknown name or field, or an impossible value, is an error of one line."""
    name, _, rest = text.partition(":")
    made = _find(package_name, kind, name)
    fields = {field.name: field for field in dataclasses.fields(made)}
    hints = typing.get_type_hints(made)
    values: dict[str, Any] = {}
    # a comma separates fields only if a new field follows, so `layers=4-9,12` stays one value
    for item in re.split(r",(?=[a-z_]+=)", rest) if rest else []:
        field, separator, value = item.partition("=")
        if not separator:
            raise UsageError(f"{kind} {text!r}: {item!r} is not field=value")
        if field not in fields:
            raise unknown_name(f"field of {kind} {name}", field, fields)
        if field in values:
            raise UsageError(f"{kind} {text!r} sets {field} twice")
        values[field] = _value(value, hints[field], f"{kind} {name}: {field}")
    missing = [field.name for field in fields.values() if field.name not in values and _has_no_default(field)]
    if missing:
        raise UsageError(f"{kind} {name} needs {', '.join(missing)}")
    return made(**values)


def purpose_of(made: type) -> str:
    """What a class is for, in a line: its `purpose`, or the first paragraph of its docstring."""
    first = (inspect.getdoc(made) or "").partition("\n\n")[0]
    return str(getattr(made, "purpose", None) or first.replace("\n", " "))


def describe(instance: Any) -> str:
    """The text for `parse` that gives this instance, with every field, so that defaults are on record too."""
    fields = ",".join(f"{f.name}={value_text(getattr(instance, f.name))}" for f in dataclasses.fields(instance))
    return f"{instance.name}:{fields}" if fields else instance.name


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(text: str, hint: Any, where: str) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        allowed = typing.get_args(hint)
        if text not in allowed:
            raise unknown_name(where, text, allowed)
        return text
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        choices = typing.get_args(hint)
        if text == "none" and type(None) in choices:
            return None
        words = [word for each in choices for word in typing.get_args(each)]  # such as `all` instead of a number
        if text in words:
            return text
        plain = [each for each in choices if each is not type(None) and typing.get_origin(each) is None]
        if not plain:
            raise unknown_name(where, text, words)
        hint = plain[0]
    if hint is bool:
        if text not in ("true", "false"):
            raise UsageError(f"{where} {text!r} is neither true nor false")
        return text == "true"
    try:
        return hint(text)
    except ValueError:
        raise UsageError(f"{where} {text!r} is not {'a whole number' if hint is int else 'a number'}") from None


def value_text(value: Any) -> str:
    """The text of a field's value, as `parse` reads it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


TUNED = "tuned"


class Tuned(NamedTuple):
    values: tuple[Any, ...]  # from the most careful to the cheapest
    is_ordered: bool  # later values are cheaper; if False, the order means nothing


def tuned(*values: Any, is_ordered: bool = True) -> Mapping[str, Any]:
    return {TUNED: Tuned(values, is_ordered)}


def tuned_fields(made: type) -> dict[str, Tuned]:
    """The tuned fields of a class, by name."""
    fields = dataclasses.fields(made)
    return {field.name: field.metadata[TUNED] for field in fields if TUNED in field.metadata}
