"""A progress bar on a terminal, silence elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")


def _can_show() -> bool:
    """Whether this is a terminal, and rich is installed, which decoding does not need."""
    return sys.stderr.isatty() and find_spec("rich") is not None


def progress(items: Iterable[Item], *, total: int, label: str) -> Iterator[Item]:
    """Yields the items, and moves a bar for each."""
    if not _can_show():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description=label)


@contextmanager
def counting_progress(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per name, moved by (name, done, total); on anything but a terminal nothing is shown."""
    if not _can_show():
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        known: dict[str, TaskID] = {}

        def move(name: str, done: int, total: int) -> None:
            if name not in known:
                known[name] = bar.add_task(f"{label} {name}", total=total)
            bar.update(known[name], completed=done, total=total)

        yield move


@contextmanager
def budget_progress(label: str, seconds: float) -> Iterator[Callable[[str], None]]:
    """A bar of the time that may be used, told what is being done; on anything but a terminal nothing is shown."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[what]}"))
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=seconds, what="")
        yield lambda what: bar.update(task, completed=min(seconds, time.monotonic() - started), what=what)
