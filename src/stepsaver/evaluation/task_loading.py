"""Loads lm-eval's task objects by a task's name, and checks everything that would fail after generation.

The harness's own definitions are used, file by file. Our changes replace entries of its index: local documents, GPQA's
shuffle, HumanEval's scorer, and the prompts of our variants.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import local_data, special_tasks
from stepsaver.evaluation.hub_access import dataset_problem, reachable_hub
from stepsaver.evaluation.records import InferencePath
from stepsaver.evaluation.sandbox import require_sandbox
from stepsaver.evaluation.task_registry import (
    TaskDeclaration,
    find_declaration,
    harness_names,
    package_folder,
    unknown_task,
)

REPORTED_AS = {"pass_at_k": "pass@1"}  # metric functions whose result's key is not their name
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskOptions:
    """`metric` names the accuracy of a task that has no declaration, or replaces the declared one."""

    data_dir: Path | None = None
    num_fewshot: int | None = None
    metric: str | None = None
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class LoadedTask:
    """A task or a group of tasks, ready to be evaluated. `harness` is what lm-eval's `evaluate` takes."""

    name: str
    path: InferencePath
    accuracy: str
    beside: tuple[str, ...]
    runs_unsafe_code: bool
    harness: dict[str, Any]

    @property
    def num_fewshot(self) -> int | dict[str, int]:
        """The number of examples in a prompt; by task if the tasks of a group differ."""
        shots = {name: int(task.config.num_fewshot or 0) for name, task in self.harness["tasks"].items()}
        return shots if len(set(shots.values())) > 1 else next(iter(shots.values()))


def load_task(name: str, options: TaskOptions | None = None) -> LoadedTask:
    """Checks and loads a task with its documents. Do this before loading a model, as most mistakes show up here."""
    options = options or TaskOptions()
    declaration, manager = _locate(name)
    _require_preparation(name, declaration, options)
    index = manager.task_index
    base = name.removesuffix(declaration.suffix) if declaration else name
    changed = _changed_entries(index, base, declaration, options)
    is_local = bool(options.data_dir or (declaration and declaration.data))
    is_gated = bool(declaration and declaration.preparation == "gpqa")
    with _laid_over(index, changed), _quiet_harness(), contextlib.nullcontext() if is_local else reachable_hub():
        harness = _load(manager, name, is_gated=is_gated)
    for task in harness["tasks"].values():
        _set_fewshot(task, options.num_fewshot)
    return _loaded(name, declaration, options, harness)


def _require_preparation(name: str, declaration: TaskDeclaration | None, options: TaskOptions) -> None:
    preparation = declaration.preparation if declaration else None
    if preparation == "ifeval":
        special_tasks.require_ifeval()
    if preparation == "humaneval":
        require_sandbox(confirmed=options.confirm_run_unsafe_code, task=name)


def _locate(name: str) -> tuple[TaskDeclaration | None, Any]:
    """The declaration for a name, if any, and an index that has the name. A pattern may cover names without a task."""
    declaration = find_declaration(name)
    if declaration is not None:
        manager = _index_of([package_folder(place) for place in (declaration.source, declaration.groups) if place])
        if name.removesuffix(declaration.suffix) in manager.task_index:
            return declaration, manager
    if name not in harness_names():
        if declaration is not None and declaration.name == name:
            raise UsageError(f"task {name} stands in no file of {declaration.source} that lm-eval can read")
        raise unknown_task(name)
    file = harness_names()[name]
    return None, _index_of([file.parent] if file else None)


def _index_of(folders: list[Path] | None) -> Any:
    """An index of some folders, which takes a tenth of a second. Groups that we do not declare need the whole index."""
    from lm_eval.tasks import TaskManager

    if folders is not None:
        return TaskManager(include_defaults=False, include_path=folders)
    logger.warning("building lm-eval's whole task index, which takes half a minute")
    return TaskManager()


def _changed_entries(
    index: Mapping[str, Any], base: str, declaration: TaskDeclaration | None, options: TaskOptions
) -> dict[str, Any]:
    """New index entries for the tasks below `base`, under their own names or a variant's."""
    suffix = declaration.suffix if declaration else ""
    entries = {}
    missing = []
    for leaf in _leaves(index, base):
        config = _config(index[leaf], declaration)
        if not _take_local_documents(config, leaf, declaration, options):
            missing.append(leaf)
        config["task"] = leaf + suffix
        entries[leaf + suffix] = replace(index[leaf], name=leaf + suffix, yaml_path=None, cfg=config)
    if missing:
        folder, present = options.data_dir, sorted(set(entries) - {leaf + suffix for leaf in missing})
        raise UsageError(
            f"{folder} has no documents for {len(missing)} of {len(entries)} tasks of {base}: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}; there are: {', '.join(present) or 'none'}"
        )
    return entries | (_variant_groups(index, base, suffix) if suffix else {})


def _variant_groups(index: Mapping[str, Any], name: str, suffix: str) -> dict[str, Any]:
    """Entries for a variant's groups and tags: the same as in the index, under the variant's names."""
    entry = index[name]
    if entry.kind.name == "TAG":
        return {name + suffix: replace(entry, name=name + suffix, tags={tag + suffix for tag in entry.tags})}
    if entry.kind.name != "GROUP":
        return {}
    below: dict[str, Any] = {}

    def renamed(members: Any) -> Any:
        if isinstance(members, str):
            below.update(_variant_groups(index, members, suffix) if members in index else {})
            return members + suffix
        if isinstance(members, Mapping):
            return {key: renamed(each) if key in ("task", "group") else each for key, each in members.items()}
        return [renamed(each) for each in members]

    config = {**entry.cfg, "group": name + suffix, "task": renamed(entry.cfg["task"])}
    return {**below, name + suffix: replace(entry, name=name + suffix, yaml_path=None, cfg=config)}


def _leaves(index: Mapping[str, Any], name: str) -> list[str]:
    """The single tasks below a name."""
    entry = index[name]
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name != "GROUP":
        return [name]
    return list(dict.fromkeys(_leaves_of(index, entry.cfg["task"])))


def _leaves_of(index: Mapping[str, Any], members: Any) -> Iterator[str]:
    """The single tasks of a group's members, which are names, tasks with changes, or inline groups."""
    if isinstance(members, str):
        yield from _leaves(index, members) if members in index else ()
    elif isinstance(members, Mapping):
        yield from _leaves_of(index, members.get("task") or ())
    else:
        for member in members:
            yield from _leaves_of(index, member)


def _config(entry: Any, declaration: TaskDeclaration | None) -> dict[str, Any]:
    """The official definition with our changes."""
    from lm_eval.tasks._yaml_loader import load_yaml

    preparation = declaration.preparation if declaration else None
    try:
        config = load_yaml(entry.yaml_path, resolve_func=preparation != "humaneval")
    except Exception as error:  # the file may refer to any Python code
        raise _not_loadable(entry.name, error) from error
    if preparation == "humaneval":
        config |= special_tasks.scorer_changes(entry.name)
    if preparation == "gpqa":
        config["process_docs"] = special_tasks.shuffled_documents
    return config | dict(declaration.changes if declaration else ())


def _take_local_documents(
    config: dict[str, Any], leaf: str, declaration: TaskDeclaration | None, options: TaskOptions
) -> bool:
    """Makes a task use local files. Returns False if the documents that it evaluates are missing."""
    folder = package_folder(declaration.data) if declaration and declaration.data else options.data_dir
    if folder is None:
        return True
    local_data.require_folder(folder)
    source = local_data.DataSource(leaf, config.get("dataset_path") or leaf, config.get("dataset_name"))
    evaluated = config.get("test_split") or config.get("validation_split")
    splits: dict[str, Any] = {}
    for key in ("test_split", "validation_split", "training_split", "fewshot_split"):
        split = config.get(key)
        if split is None or split in splits:
            continue
        rows = local_data.read_split(folder, source, split, is_evaluated=split == evaluated)
        if rows is not None:
            splits[split] = rows
        elif split == evaluated:
            return False
        elif split == _fewshot_split(config, options.num_fewshot):
            raise UsageError(f"{folder} has no {split} documents for {leaf}, which its few-shot examples come from")
        else:
            config[key] = None
    config["custom_dataset"] = _Documents(splits)
    return True


def _fewshot_split(config: Mapping[str, Any], num_fewshot: int | None) -> str | None:
    """The split that lm-eval takes examples from, if it needs any from the documents."""
    shots = config.get("num_fewshot") if num_fewshot is None else num_fewshot
    if not shots or (config.get("fewshot_config") or {}).get("samples"):
        return None
    return config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")


@dataclass(frozen=True)
class _Documents:
    """lm-eval calls this instead of the hub. It passes the task's metadata, which says nothing about documents."""

    splits: dict[str, list[dict[str, Any]]]

    def __call__(self, **_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {split: Dataset.from_list(rows) for split, rows in self.splits.items()}


def _load(manager: Any, name: str, *, is_gated: bool) -> dict[str, Any]:
    try:
        return manager.load([name])
    except Exception as error:
        raise dataset_problem(name, error, is_gated=is_gated) or _not_loadable(name, error) from error


def _not_loadable(name: str, error: Exception) -> UsageError:
    """A one-line error for whatever lm-eval, or a package that a task needs, reports."""
    said = next(iter(str(error).strip().splitlines()), "")
    reason = said if isinstance(error, ImportError | AssertionError) else f"{type(error).__name__}: {said}"
    return UsageError(f"task {name} cannot be loaded by lm-eval: {reason}")


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Does what lm-eval does, but shots for a task that is 0-shot by definition are an error instead of ignored."""
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own == 0 and num_fewshot:
        raise UsageError(f"{task.config.task} is a 0-shot task by definition; {num_fewshot} shots are not possible")
    if num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _loaded(
    name: str, declaration: TaskDeclaration | None, options: TaskOptions, harness: dict[str, Any]
) -> LoadedTask:
    tasks = harness["tasks"].values()
    keys = list(dict.fromkeys(key for task in tasks for key in metric_keys(task)))
    if declaration is None and options.metric is None:
        raise UsageError(
            f"task {name} has no declared accuracy; name its metric with --metric, one of {' '.join(keys)}"
        )
    accuracy = options.metric or (declaration.accuracy if declaration else "")
    if accuracy not in keys:
        raise UsageError(f"task {name} has no metric {accuracy!r}; it has {' '.join(keys)}")
    runs_unsafe_code = any(getattr(task, "UNSAFE_CODE", False) for task in tasks)
    if runs_unsafe_code and not (declaration and declaration.preparation == "humaneval"):
        raise UsageError(f"task {name} runs model-written programs, and lm-eval's scorer for it has no sandbox")
    scores = all(task.OUTPUT_TYPE != "generate_until" for task in tasks)
    return LoadedTask(
        name,
        path="scoring" if scores else "generation",
        accuracy=accuracy,
        beside=declaration.beside if declaration else (),
        runs_unsafe_code=runs_unsafe_code,
        harness=harness,
    )


def metric_keys(task: Any) -> list[str]:
    """The keys that a task's results will have: every metric under every filter."""
    metrics = [REPORTED_AS.get(metric, metric) for metric in task.aggregation()]
    filters = [each.name for each in task._filters]
    return [f"{metric},{name}" for metric in metrics for name in filters]


@contextlib.contextmanager
def _laid_over(index: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    before = {name: index[name] for name in entries if name in index}
    index.update(entries)
    try:
        yield
    finally:
        for name in entries:
            index.pop(name)
        index.update(before)


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Silences lm-eval, which warns about every task that has its own documents."""
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(level)
