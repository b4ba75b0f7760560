"""The process that renders chat templates: a line of JSON in, a line of JSON out, until the input ends.

A template comes with a checkpoint and is a program. It runs in jinja2's sandbox, in a process of its own and with
limits, so the worst it can do is fail. This file is run by its path and imports nothing of the package.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5  # of processor time, for one conversation
MEMORY = 256 << 20  # bytes
LONGEST = 4 << 20  # characters of a conversation


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here the tag is ignored and its content kept."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment as transformers sets it up, which templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in template.generate(values):
        parts.append(part)
        length += len(part)
        if length > LONGEST:
            raise ValueError(f"it wrote more than {LONGEST} characters")
    return "".join(parts)


def answer(request: dict[str, Any], compiled: Callable[[str], jinja2.Template]) -> dict[str, str]:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    until = int(spent.ru_utime + spent.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    try:
        return {"text": render(compiled(request["template"]), request["values"])}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MB"}
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:LONGEST]}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when this one ends
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    compiled = lru_cache(maxsize=1)(environment().from_string)  # a checkpoint has one template and thousands of prompts
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line), compiled)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
