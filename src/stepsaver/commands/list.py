"""`stepsaver list KIND`: what there is to choose from, in 80 columns or, with `--wide`, all that is known of it."""

import argparse
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from stepsaver.engine.defaults import DECODE

HELP = "the rules, policies, decoders, tasks or models that there are"
COLUMNS, INDENT = 80, "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--wide", action="store_true", help="everything that is known, in lines of any length")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


class Entry(NamedTuple):
    head: str
    lines: tuple[str, ...]  # what it is for; a paragraph each
    more: tuple[str, ...] = ()  # with --wide
    facts: Any = None  # with --json


def run(options: argparse.Namespace) -> int:
    entries = dict(KINDS[options.kind]())
    if options.json:
        print(json.dumps({name: entry.facts for name, entry in entries.items()}))
        return 0
    for entry in entries.values():
        lines = [INDENT + line for each in (*entry.lines, *entry.more) for line in each.splitlines()]
        if not options.wide:
            wrap = textwrap.TextWrapper(COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT)
            lines = [line for each in entry.lines for line in wrap.wrap(each)]
        head = entry.head if options.wide else textwrap.fill(entry.head, COLUMNS, subsequent_indent=INDENT)
        print("\n".join([head, *lines]))
    return 0


def _rules() -> Iterator[tuple[str, Entry]]:
    from stepsaver.bench.folders import experiments_folder
    from stepsaver.bench.rule_figures import figures_of, stored_figures

    figures = stored_figures(experiments_folder())
    for name, entry in _registered("rules"):
        found = figures_of(name, figures)
        measured = [f"measured: {each}" for each in found] or ["nothing is stored of it here"]
        facts = entry.facts | {"measured": [each._asdict() for each in found]}
        yield name, entry._replace(more=(*measured, *entry.more), facts=facts)


def _registered(kind: str) -> Iterator[tuple[str, Entry]]:
    """The classes of one of the engine's registries."""
    from stepsaver.engine import registry
    from stepsaver.engine.rules.rule import rule_class

    for name, made in registry.all_of(f"stepsaver.engine.{kind}").items():
        if kind == "rules":
            rule_class(made)
        fields = () if name == DECODE else dataclasses.fields(made)  # its policy and rules are options of their own
        about = inspect.getdoc(made) or ""
        purpose = registry.purpose_of(made)
        defaults = {each.name: None if each.default is dataclasses.MISSING else each.default for each in fields}
        facts = {"fields": defaults, "about": about, "for": purpose}
        head = f"{name}({', '.join(map(_field_text, fields))})" if fields else name
        yield name, Entry(head, (purpose,), (about,), facts)


def _field_text(field: "dataclasses.Field[Any]") -> str:
    """Returns a field as it is written on a command line; its name alone if a value has to be given."""
    from stepsaver.engine import registry

    return field.name if field.default is dataclasses.MISSING else f"{field.name}={registry.value_text(field.default)}"


def _tasks() -> Iterator[tuple[str, Entry]]:
    from stepsaver.evaluation.task_registry import task_declarations

    for name, each in task_declarations().items():
        facts = {key: getattr(each, key) for key in ("path", "accuracy", "beside", "also", "summary")}
        more = (f"also {', '.join(each.also)}",) if each.also else ()
        yield name, Entry(f"{name}: {each.path}, accuracy {each.accuracy}", (each.summary,), more, facts)


def _models() -> Iterator[tuple[str, Entry]]:
    from stepsaver.engine.models.architecture import architectures

    about = "the model that ships with the package: --model embedded, which is the default of generate and score"
    yield "embedded", Entry("embedded", (about,), facts={"about": about})
    for name, architecture in architectures().items():
        size = architecture.block_size
        blocks = "blocks as config.json or --block-size says" if size is None else f"blocks of {size}"
        yield name, Entry(name, (blocks,), facts=dataclasses.asdict(architecture))


KINDS: dict[str, Callable[[], Iterator[tuple[str, Entry]]]] = {
    "rules": _rules,
    "policies": lambda: _registered("policies"),
    "decoders": lambda: _registered("decoders"),
    "tasks": _tasks,
    "models": _models,
}
