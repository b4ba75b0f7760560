"""Writes into this repository's Markdown what other files say: `python tools/docs.py`, or `--check` for exit code 1.

<!-- figures accuracy, drop, speed_up              a table of committed artifacts: fields, then a row per reference
02_trim/mini_gsm8k/baseline      no reuse          (experiment/task/config, in the experiment's own pages without
02_trim/mini_gsm8k/window_*                        the experiment; a pattern is several rows) and what it is called
-->
<!-- /figures -->
<!-- figures measured/NAME -->                     the table of benchmarks/measured/NAME.json
<!-- tables -->                                    in an experiment's results.md: all of its tables
<!-- commands -->, <!-- experiment.yaml -->        the references, from the parsers and from the schema
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from math import isnan
from pathlib import Path
from pkgutil import iter_modules

from pydantic import BaseModel

from stepsaver import commands
from stepsaver.bench.documents import Summary
from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import ConfigSpec, Criterion, DecodingSpec, Experiment, ExperimentSpec, Grid, Resources
from stepsaver.bench.experiment import Success as SuccessSpec
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.statistics import Interval
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.report.artifacts import read_artifacts
from stepsaver.report.blocks import markdown_table
from stepsaver.report.cells import ReportTask
from stepsaver.report.results_page import result_tables
from stepsaver.report.tables import unjudged

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*/*.md", "experiments/*/*.md")
CODE = r"(?P<code>^```.*?^```|`[^`\n]+`)"  # shows markers, and is none
MARKED = re.compile(rf"{CODE}|(?P<begin><!-- (?P<kind>figures|tables|commands|experiment\.yaml)\b(?P<of>[^>]*?)-->)"
                    r"(?P<old>.*?)(?P<end><!-- /(?P=kind) -->)", re.DOTALL | re.MULTILINE)  # fmt: skip
NOT_RUN = "not run yet"


def _interval(value: Interval | None, form: str, unit: str = "") -> str:
    if value is None or isnan(value.value):
        return "-"
    middle, low, high = (format(each, form).replace("-0.0", "0.0") for each in value)
    return f"{middle}{unit} [{low}, {high}]"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _outcome(task: ReportTask, one: Summary) -> str:
    return next((each.outcome for each in task.verdict().configs if each.config == one.config), unjudged(one))


# Of a config: what a table calls the figure, and how it is written.
FIELDS: dict[str, tuple[str, Callable[[ReportTask, Summary], str]]] = {
    "accuracy": ("right", lambda task, one: f"{one.accuracy:.1%}"),
    "drop": ("drop in points (95 %)", lambda task, one: _interval(one.paired.drop_points, ".1f")),
    "speed_up": ("speed-up (95 %)", lambda task, one: _interval(one.speed_up.smaller, ".2f", "x")),
    "over_reference": (
        "over autoregressive (95 %)",
        lambda task, one: _interval(one.over_reference.smaller if one.over_reference else None, ".2f", "x"),
    ),
    "rate": ("tokens/s", lambda task, one: f"{one.rate.value:,.0f}" if one.rate else "-"),
    "predicted": ("predicted", lambda task, one: _times(one.predicted)),
    "samples": ("samples", lambda task, one: f"{one.samples:,}"),
    "verdict": ("verdict", _outcome),
}
OF_BASELINE = {"drop": "", "speed_up": "1.00x", "predicted": ""}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes into Markdown what artifacts, parsers and the schema say.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    options = parser.parse_args(arguments)
    changed = False
    for path in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        try:
            new = renewed(text, path, root)
        except UsageError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if new != text:
            changed = True
            print(f"{path.relative_to(root)}{' would change' * options.check}")
            if not options.check:
                write_beside(path, new)
    return int(changed and options.check)


def renewed(text: str, path: Path, root: Path) -> str:
    """Returns what a page should say."""
    own = path.parent.name if (path.parent / "experiment.yaml").exists() else ""

    def content(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match[0]
        if match["kind"] == "commands":
            new = command_reference()
        elif match["kind"] == "experiment.yaml":
            new = experiment_reference()
        elif match["kind"] == "tables":
            tasks = stored_tasks(read_own(path.parent))
            new = result_tables(tasks) if tasks else NOT_RUN
        elif match["of"].strip().startswith("measured/"):
            new = measured_table(root / "benchmarks" / f"{match['of'].strip()}.json")
        else:
            new = artifacts_table(match["of"], root, own)
        return f"{match['begin']}\n{new}\n{match['end']}"

    return MARKED.sub(content, text)


def artifacts_table(marker: str, root: Path, own: str) -> str:
    head, *lines = marker.strip().splitlines()
    names = [each.strip() for each in head.split(",")]
    for name in names:
        if name not in FIELDS:
            raise unknown_name("figure", name, FIELDS)
    rows = [row for line in lines for row in _rows(line, names, root, own)]
    return markdown_table(rows, ("", *(FIELDS[name][0] for name in names)))


def _rows(line: str, names: list[str], root: Path, own: str) -> Iterator[tuple[str, ...]]:
    reference, _, label = line.strip().partition(" ")
    parts = reference.split("/")
    if own and len(parts) == 2:
        parts = [own, *parts]
    if len(parts) != 3:
        raise UsageError(f"{reference!r} is no reference such as experiment/task/config")
    experiment, folder, config = read_own(root / "experiments" / parts[0]), parts[1], parts[2]
    known = [each.name for each in experiment.configs]
    if not any(fnmatchcase(name, config) for name in known):
        raise unknown_name("config", config, known)
    task = read_artifacts(experiment, experiment.folder / "results", folder)
    found = [each for each in task.summaries if fnmatchcase(each.config, config)] if task else []
    for one in found:
        assert task is not None
        figures = (
            OF_BASELINE[name] if one.is_baseline and name in OF_BASELINE else FIELDS[name][1](task, one)
            for name in names
        )
        yield (label.strip() or f"`{one.config}`", *figures)
    if not found:
        yield (label.strip() or f"`{config}`", NOT_RUN, *[""] * (len(names) - 1))


@cache
def read_own(folder: Path) -> Experiment:
    known = [path.parent.name for path in sorted(folder.parent.glob("*/experiment.yaml"))]
    if folder.name not in known:
        raise unknown_name("experiment", folder.name, known)
    return read_experiment(folder)


def stored_tasks(experiment: Experiment) -> list[ReportTask]:
    """Returns an experiment's own tasks, then whatever else was saved."""
    saved = sorted(path.name for path in (experiment.folder / "artifacts").glob("*") if path.is_dir())
    names = dict.fromkeys([*experiment.spec.tasks, *saved])
    found = (read_artifacts(experiment, experiment.folder / "results", name) for name in names)
    return [task for task in found if task is not None]


def measured_table(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows, columns = [tuple(row) for row in content["rows"]], tuple(content["columns"])
        about = f"`{content['command']}` on {content['machine']}, {content['date']}."
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is no stored measurement") from None
    return f"{markdown_table(rows, columns)}\n\n{about}"


def command_reference() -> str:
    """Returns a section per command: what it does, and a table of what it takes."""
    names = sorted(each.name for each in iter_modules(commands.__path__) if not each.name.startswith("_"))
    return "\n\n".join(part for name in names for part in _command(name))


def _command(name: str) -> Iterator[str]:
    command = import_module(f"{commands.__name__}.{name}")
    parser = argparse.ArgumentParser(prog=f"stepsaver {name}", add_help=False)
    command.add_arguments(parser)
    yield f"## stepsaver {name}"
    yield f"{command.HELP[:1].upper()}{command.HELP[1:]}".rstrip(".") + "."
    actions = [each for each in parser._actions if each.help is not argparse.SUPPRESS]  # the one list that argparse has
    if actions:
        yield markdown_table([(_called(each), _explained(parser, each)) for each in actions], ("argument", ""))


def _called(action: argparse.Action) -> str:
    """Returns an argument as it is typed: its names and its value."""
    metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else metavar or choices or action.dest.upper()
    if not action.option_strings:
        return f"`{value}`" + (" ..." if action.nargs in ("*", "+") else "")
    return ", ".join(f"`{f'{option} {value}'.strip()}`" for option in action.option_strings)


def _explained(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
    text = (action.help or "") % (values | {"prog": parser.prog})
    return text + "; required" * bool(action.required and action.option_strings)


def experiment_reference() -> str:
    """Returns a section per part of `experiment.yaml`: what it is, its keys, their kinds and defaults."""
    parts: dict[str, type[BaseModel]] = {
        "The file": ExperimentSpec, "A config in `configs`": ConfigSpec, "A grid instead of a list of `configs`": Grid,
        "`decoding`": DecodingSpec, "`success`": SuccessSpec, "`confirm_if` and `reject_if`": Criterion,
        "`resources`": Resources,
    }  # fmt: skip
    return "\n\n".join(text for title, model in parts.items() for text in _part(title, model))


def _part(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}"
    yield " ".join((model.__doc__ or "").split())
    schema = model.model_json_schema()
    rows = [
        (f"`{name}`", _kind(each), _default(each, name in schema.get("required", ())), each.get("description", ""))
        for name, each in schema["properties"].items()
    ]
    is_told = any(row[3] for row in rows)
    yield markdown_table([row[: 3 + is_told] for row in rows], ("key", "kind", "default", "")[: 3 + is_told])


def _kind(field: dict[str, object]) -> str:
    """Returns what a value may be, in the words of YAML."""
    if isinstance(choices := field.get("anyOf"), list):
        return " or ".join(dict.fromkeys(_kind(each) for each in choices if each.get("type") != "null"))
    if isinstance(names := field.get("enum"), list):
        return ", ".join(f"`{name}`" for name in names)
    if isinstance(reference := field.get("$ref"), str):
        return {"Grid": "a grid", "Criterion": "bounds", "Condition": "a condition such as `> 1.2`"}.get(
            reference.rpartition("/")[2], "keys of its own, below"
        )
    kind = {"string": "text", "integer": "whole number", "boolean": "true or false", "array": "list"}.get(
        str(field.get("type")), str(field.get("type")).replace("object", "map")
    )
    least, most = field.get("minimum"), field.get("maximum")
    is_bounded = isinstance(most, int) and most < 1 << 30
    return kind + (f", {least} to {most}" if is_bounded else f" from {least} on" if least in (0, 1) else "")


def _default(field: dict[str, object], is_required: bool) -> str:
    value = field.get("default")
    if is_required:
        return "required"
    return f"`{json.dumps(value)}`" if value not in (None, {}, []) and not isinstance(value, dict) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
