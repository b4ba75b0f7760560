"""The `stepsaver` command: finds the commands, runs one, and answers a user's mistake with one line and exit code 2."""

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pkgutil import iter_modules
from typing import NoReturn

from stepsaver import __version__, commands
from stepsaver.engine.errors import UsageError, one_line
from stepsaver.extras import named_parts

DONE, CHECK_FAILED, WRONG_USE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
# By the name that a command had, what has its work now.
MOVED = {
    "audit": "stepsaver report NAME, with --check for exit code 1",
    "calibrate": "python -m benchmarks.calibrate, in a clone of the repository",
    "discard": "stepsaver run --force --why TEXT, which keeps what was stored and records why",
    "docs": "python tools/docs.py, in a clone of the repository",
    "foresee": "it is gone; `stepsaver run` prints what was measured beside what is predicted",
    **{kind: f"stepsaver list {kind}" for kind in ("rules", "policies", "tasks", "models")},
    "speed": "python -m benchmarks.speed, in a clone of the repository",
    "train": "python -m training, in a clone of the repository",
    "verdict": "stepsaver report NAME",
}
NOTHING_KEPT = "nothing was written"  # unless a command's `WHEN_STOPPED` says what a stop leaves


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line; `--help` says the rest."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class Terminated(BaseException):
    """Somebody, or the cluster, asked this process to end (SIGTERM)."""


class OwnNotes(logging.Handler):
    """Prints this package's own warnings as notes. Records of libraries without a handler end here too, unprinted."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("stepsaver.") and record.levelno >= logging.WARNING:
            print(f"note: {record.getMessage()}", file=sys.stderr)


def build_parser(command_name: str | None) -> argparse.ArgumentParser:
    """Returns a parser with all commands and their help. Only `command_name` gets its flags: some need slow imports."""
    parser = OneLineParser(prog="stepsaver", description="Cross-step compute reuse in block-diffusion language models.")
    parser.add_argument("--version", action="version", version=f"stepsaver {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in sorted(each.name for each in iter_modules(commands.__path__) if not each.name.startswith("_")):
        command = import_module(f"{commands.__name__}.{module}")
        sub = chosen.add_parser(module, help=command.HELP, description=command.HELP)
        if module == command_name:
            command.add_arguments(sub)
        sub.set_defaults(run=command.run, when_stopped=getattr(command, "WHEN_STOPPED", NOTHING_KEPT))
    return parser


def parse(parser: argparse.ArgumentParser, given: Sequence[str], options: argparse.Namespace) -> None:
    """Parses the arguments into `options`. Accepts configs after flags (`run NAME --limit 10 CONFIG`), which argparse
    does not.
    """
    _, rest = parser.parse_known_args(given, options)
    if rest:
        if not isinstance(getattr(options, "configs", None), list) or any(each.startswith("-") for each in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.configs += rest


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = argparse.Namespace(when_stopped=NOTHING_KEPT)

    def run() -> int:
        named = next((each for each in given if not each.startswith("-")), None)
        if named in MOVED:
            raise UsageError(f"there is no command {named} any more: {MOVED[named]}")
        parse(build_parser(named), given, options)
        code: int = options.run(options)
        return code

    return answered(run, lambda: str(options.when_stopped))


def answered(run: Callable[[], int], when_stopped: Callable[[], str]) -> int:
    """Runs a command and returns its exit code. What a user did wrong is answered with one line."""
    try:
        with _terminable(), _quiet_libraries(), named_parts():
            return run()
    except UsageError as error:
        return _complain(str(error), WRONG_USE)
    except KeyboardInterrupt:
        return _complain(f"stopped; {when_stopped()}", INTERRUPTED)
    except Terminated:
        return _complain(f"terminated; {when_stopped()}", TERMINATED)
    except BrokenPipeError:  # the reader of our output has gone, as in `stepsaver ... | head`
        sys.stderr.close()
        return DONE
    except OSError as error:  # a file or a folder is not what it should be; the system says why
        return _complain(f"{error.filename or 'the system'}: {error.strerror or error}", WRONG_USE)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _complain(f"not enough memory; smaller batches, blocks or texts need less ({error})", WRONG_USE)


def _complain(message: str, code: int) -> int:
    """Prints the message as one line, and returns the exit code."""
    print(f"stepsaver: {one_line(message)}", file=sys.stderr)
    return code


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Torch raises a class of its own on a GPU, and a plain RuntimeError on the CPU."""
    is_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or is_torch


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM unwind like Ctrl-C. Only the main thread can set that up; in others this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keeps libraries' warnings off the user's terminal, unless `python -W` or PYTHONWARNINGS asks for them."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to fail
    if sys.warnoptions:
        yield
        return
    for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    before, logging.lastResort = logging.lastResort, OwnNotes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.lastResort = before


if __name__ == "__main__":
    sys.exit(main())
