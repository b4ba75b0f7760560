"""What a training shows while it runs: a bar on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training.loop import Watcher
from training.recipe import Recipe

LINE_EVERY = 20


@contextmanager
def progress_watcher(recipe: Recipe) -> Iterator[Watcher]:
    if not sys.stderr.isatty():
        yield lambda line: _print_line(line) if line["step"] % LINE_EVERY == 0 or "held_out" in line else None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=recipe.steps)
        yield lambda line: progress.update(task, completed=line["step"], description=_summary(line))


def _summary(line: dict[str, Any]) -> str:
    return f"{line['stage']}: causal loss {line['autoregressive']:.4f}, diffusion loss {line['diffusion']:.4f}"


def _print_line(line: dict[str, Any]) -> None:
    held_out = f"; held out {line['held_out']}" if "held_out" in line else ""
    text = f"step {line['step']}, {line['seconds']:.0f} s, rate {line['rate']:.2e}, {_summary(line)}{held_out}"
    print(text, file=sys.stderr, flush=True)
