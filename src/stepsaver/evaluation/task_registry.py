"""The tasks we know. Each has a file in `tasks/` that says where lm-eval defines it and what its accuracy is.

A task's accuracy is declared, never guessed by trying keys. Any other task of lm-eval runs too, if the caller names the
metric.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.plugins import load_plugin, plugin_names, plugin_problem
from stepsaver.evaluation.records import InferencePath

GROUP = "stepsaver.tasks"
DECLARATIONS = Path(__file__).parent / "tasks"
Preparation = Literal["gpqa", "humaneval", "ifeval"]
# A task or group name in one of lm-eval's files: `task: x`, `group: "x"`, or an entry of a list below such a key.
NAMED = re.compile(r"""^["']?(task|group|tag)["']?\s*:\s*["']?([\w.+-]+)["']?\s*(?:#.*)?$""", re.MULTILINE)
LISTED = re.compile(r"""^["']?(?:tag|group)["']?\s*:\s*\n((?:\s*-\s*["']?[\w.+-]+["']?\s*\n)+)""", re.MULTILINE)


@dataclass(frozen=True)
class TaskDeclaration:
    """What we know of a task. Folders are given as `package/folder/...`."""

    name: str
    source: str  # the folder of lm-eval's files, or of our own
    path: InferencePath
    accuracy: str  # `metric,filter`, the key in lm-eval's results
    beside: tuple[str, ...] = ()  # further metrics to report
    groups: str | None = None  # another folder, if lm-eval keeps the group apart from its tasks
    also: tuple[str, ...] = ()  # patterns of other names in the source that this declaration covers
    variant_of: str | None = None  # the lm-eval name that `changes` apply to
    changes: tuple[tuple[str, Any], ...] = ()
    preparation: Preparation | None = None
    data: str | None = None  # the folder of the task's own data files, if it has any
    fresh_problems: str | None = None  # a task of the same kind with other problems, for confirming
    summary: str = ""

    @property
    def suffix(self) -> str:
        """What a variant's name adds to the original name."""
        return self.name.removeprefix(self.variant_of) if self.variant_of else ""

    def covering_pattern(self, name: str) -> str | None:
        """The longest pattern that matches a name."""
        fitting = (pattern for pattern in self.also if fnmatchcase(name, pattern))
        return max(fitting, key=len, default=None)


def task_declarations() -> dict[str, TaskDeclaration]:
    """All declarations by name: ours, and the entry points of other packages."""
    return _own() | {name: _plugin(name) for name in sorted(plugin_names(GROUP))}


@cache
def _own() -> dict[str, TaskDeclaration]:
    return {path.stem: _read(path) for path in sorted(DECLARATIONS.glob("*.yaml"))}


def _plugin(name: str) -> TaskDeclaration:
    made = load_plugin(GROUP, name, own=_own())
    if not isinstance(made, TaskDeclaration) or made.name != name:
        raise plugin_problem(GROUP, name, f"a TaskDeclaration with the name {name!r}")
    return made


def find_declaration(name: str) -> TaskDeclaration | None:
    """The declaration for a name: its own, else the one with the most specific pattern that covers it."""
    if name in plugin_names(GROUP):
        return _plugin(name)
    known = _own()
    if name in known:
        return known[name]
    covering = {pattern: each for each in known.values() if (pattern := each.covering_pattern(name))}
    return covering[max(covering, key=len)] if covering else None


def package_folder(location: str) -> Path:
    """The folder that `package/folder/...` means on this machine."""
    package, _, rest = location.partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"package {package}, which has the tasks in {location}, is not installed")
    return Path(spec.submodule_search_locations[0]) / rest


@cache
def harness_names() -> dict[str, Path | None]:
    """Every name that lm-eval's own task files mention, with the file if it is a single task.

    Scanning the text takes a second. Building the harness's index takes half a minute, too long to answer a typo.
    """
    names: dict[str, Path | None] = {}
    for path in sorted(package_folder("lm_eval/tasks").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for kind, name in NAMED.findall(text):
            names.setdefault(name, path if kind == "task" else None)
        for block in LISTED.findall(text):
            for name in re.findall(r"[\w.+-]{2,}", block):
                names.setdefault(name, None)
    return names


def unknown_task(name: str) -> UsageError:
    """The error for an unknown task, with the nearest names: of lm-eval's thousands, and of ours, the likelier ones."""
    ours = {*_own(), *plugin_names(GROUP)}
    near = {
        *difflib.get_close_matches(name, ours, n=2, cutoff=0.5),
        *difflib.get_close_matches(name, harness_names(), n=2, cutoff=0.5),
    }
    return unknown_name("task", name, near or ours)


def _read(path: Path) -> TaskDeclaration:
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    _require_keys(path, content)
    for name in ("beside", "also"):
        content[name] = tuple(content.get(name, ()))
    content["changes"] = tuple(content.get("changes", {}).items())
    return TaskDeclaration(name=path.stem, summary=text.splitlines()[0].lstrip("# "), **content)


def _require_keys(path: Path, content: dict[str, Any]) -> None:
    known = [field for field in fields(TaskDeclaration) if field.name not in ("name", "summary")]
    unknown = content.keys() - {field.name for field in known}
    missing = {field.name for field in known if field.default is MISSING} - content.keys()
    if unknown or missing:
        raise UsageError(f"{path}: unknown keys {_listed(unknown)}, missing keys {_listed(missing)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
