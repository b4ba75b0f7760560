"""Calls of the command line in processes that are held to their time and memory.

The processes are forked from a server that has imported everything. Several calls share one, so that a call costs
milliseconds; each has its own folder, output, and limits.
"""

import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stepsaver.cli import main

SECONDS = 10  # of the processor: a busy machine decides no test
PATIENCE = 120  # seconds on the clock, for a case that waits for something that never comes
MEMORY = 2 << 30  # bytes beyond what the imported libraries take
ALLOWED_CODES = (0, 1, 2, 130)
LONGEST_LINE = 2000
OUTPUTS, CODE = (".stdout", ".stderr"), ".code"
TRACEBACK = 70  # an exception that nobody caught


Command = Callable[[list[str]], int]  # arguments to exit code


class Call(NamedTuple):
    arguments: list[str]
    folder: Path  # to be in
    command: Command = main


class Outcome(NamedTuple):
    code: int  # negative: the signal that ended the process
    stdout: str
    stderr: str

    def complaint(self) -> str | None:
        """What is wrong with the way the command ended, or None."""
        if self.code not in ALLOWED_CODES or "Traceback" in self.stderr:
            return f"exit {self.code}: {self.stderr[-3000:]}"
        if self.code == 2:
            lines = [line for line in self.stderr.splitlines() if not line.startswith("note: ")]
            if len(lines) != 1 or not lines[0].isprintable() or len(lines[0]) > LONGEST_LINE:
                return f"not one line that can be printed: {self.stderr[:3000]!r}"
        return None


def run_calls(calls: list[Call]) -> list[Outcome]:
    """Makes each call in its folder. One that ends the process is the last one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.preloaded"])
    process = context.Process(target=_child, args=(calls,))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    outcomes = []
    for _, folder, _ in calls:
        written = [(folder / name).read_bytes().decode(errors="backslashreplace") for name in OUTPUTS]
        is_whole = (folder / CODE).exists()
        outcomes.append(Outcome(int((folder / CODE).read_text()) if is_whole else process.exitcode, *written))
        if not is_whole:
            break
    return outcomes


def _child(calls: list[Call]) -> None:
    _limit_memory()
    for arguments, folder, command in calls:
        os.chdir(folder)
        for descriptor, name in zip((1, 2), OUTPUTS, strict=True):
            opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        _limit_seconds()
        (folder / CODE).write_text(str(_run(command, arguments)))
    os._exit(0)


def _limit_memory() -> None:
    import huggingface_hub.constants
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_seconds() -> None:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    until = int(spent.ru_utime + spent.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _run(command: Command, arguments: list[str]) -> int:
    try:
        code = command(arguments)
    except SystemExit as ending:  # of --help
        code = ending.code if isinstance(ending.code, int) else TRACEBACK
    except BaseException:
        traceback.print_exc()
        code = TRACEBACK
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = TRACEBACK
    return code
