"""Where the shards of a run are run: one file per runner, found by its name.

A runner has `launch(shards, logs, resources, progress)`, which returns whether the shards are done.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from stepsaver.engine.errors import UsageError, unknown_name


def runner_names() -> list[str]:
    return sorted(each.name for each in iter_modules(__path__))


def find_runner(name: str) -> ModuleType:
    if name not in runner_names():
        raise unknown_name("runner", name, runner_names())
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise UsageError(f"runner {name} needs {error.name}: pip install 'stepsaver[{name}]'") from None
