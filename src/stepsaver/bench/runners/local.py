"""Shards on this machine: a single one in this process, several in a process each, with its own log.

A run that is timed several times has a process for each time: what differs between two processes on one machine (where
their memory lies, what else ran) differs between the repeats too.
"""

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from stepsaver.bench.cells import Progress
from stepsaver.bench.experiment import Resources
from stepsaver.bench.run import Shard, log_progress
from stepsaver.engine.errors import UsageError

POLL_SECONDS = 0.2


def launch(shards: Sequence[Shard], logs: Path, resources: Resources, progress: Progress) -> bool:
    """Runs all shards to their end and returns True. If one fails, what the others have stored stays."""
    if len(shards) == 1:
        run_repeats(shards[0], logs, progress)
    else:
        _run_in_processes(shards, logs, progress)
    return True


def run_repeats(shard: Shard, logs: Path, progress: Progress) -> list[str]:
    """Runs a shard as often as is asked for, the last time in this process. Returns the complete folders."""
    *before, last = shard.every_repeat()
    for each in before:
        _run_in_processes([each], logs, progress)
    return last.run(progress)


def _run_in_processes(shards: Sequence[Shard], logs: Path, progress: Progress) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    paths = [logs / f"{shard.label}-{shard.index}.log" for shard in shards]
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // len(shards))
    processes = [
        context.Process(target=_run_logged, args=(shard, path, threads))
        for shard, path in zip(shards, paths, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            for path in paths:
                progress(path.stem, *_chunks_done(path))
            time.sleep(POLL_SECONDS)
    except BaseException:  # nobody is left to wait for them; what they have stored stays
        for process in processes:
            if process.is_alive():
                process.terminate()
        raise
    failed = [path for process, path in zip(processes, paths, strict=True) if process.exitcode]
    if failed:
        raise UsageError(f"{len(failed)} of {len(shards)} shards failed, see {failed[0]}; run again to go on")


def _run_logged(shard: Shard, path: Path, threads: int) -> None:
    """Runs a shard in a process of its own; all that it prints goes to its log."""
    with path.open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(threads)
    shard.run(log_progress)


def _chunks_done(path: Path) -> tuple[int, int]:
    """Returns the chunks done and the chunks in all of the config that a shard's log mentions last."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.findall(r": (\d+) of (\d+) chunks$", text, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 1)
