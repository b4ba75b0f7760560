"""Renders a checkpoint's chat template as transformers does: in jinja2's sandbox, in this process.

A template is a program of a stranger. The sandbox keeps it from everything but its values; here it is also kept from
filling the memory, and from loops that do not end soon. What is not stopped stands in docs/reliability.md.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, wraps
from itertools import chain
from string import Formatter
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from stepsaver.engine.errors import UsageError

LONGEST = 4 << 20  # characters of a conversation, and of each text or list on the way
WORK = 64 << 20  # characters that a rendering may make in all
ROUND, CALL = 64, 256  # characters that one round of a loop counts for, and one call of a function or filter
TEMPLATE = 1 << 18  # characters of a template; compiling so many takes seconds
_left: ContextVar[list[int]] = ContextVar("what is left of a rendering's work")


class ChatTemplate:
    """A template, and the texts that it may use in addition to the messages, such as the stop token's."""

    def __init__(self, template: str, texts: Mapping[str, str]) -> None:
        self.template, self.texts = template, dict(texts)

    def render(self, messages: list[dict[str, str]], *, opens_answer: bool) -> str:
        values = self.texts | {
            "messages": messages, "tools": None, "documents": None, "add_generation_prompt": opens_answer,
        }  # fmt: skip
        with _limited():
            return _joined(self._compiled.generate(values))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.template) > TEMPLATE:
            raise _TooMuch(f"it has more than {TEMPLATE} characters")
        environment = _Environment()
        return environment.from_string(_Counted().visit(environment.parse(self.template)))


class _TooMuch(Exception):
    """A template that exceeds a limit."""


@contextmanager
def _limited() -> Iterator[None]:
    """Gives a rendering its share of work. A template may raise anything: that is one line."""
    token = _left.set([WORK])
    try:
        yield
    except Exception as error:
        said = str(error) if isinstance(error, _TooMuch) else f"{type(error).__name__}: {error}"
        raise UsageError(f"the chat template fails: {' '.join(said[:LONGEST].split())[:300]}") from None
    finally:
        _left.reset(token)


def _spend(characters: int) -> None:
    left = _left.get()
    left[0] -= characters
    if left[0] < 0:
        raise _TooMuch(f"its loops and texts exceed {WORK} characters (a round counts {ROUND}, a call {CALL})")


def _checked(made: Any) -> Any:
    """Counts a value that was just made."""
    _spend(len(made) if isinstance(made, Collection) else made.bit_length() if isinstance(made, int) else 0)
    return made


def _written(value: Any) -> Any:
    _size(value)
    return _checked(value)


def _require(characters: int) -> None:
    if characters > LONGEST:
        raise _TooMuch(f"it makes more than {LONGEST} characters at once")


def _size(*values: Any) -> int:
    """What values are worth in characters, with the same value counted as often as it occurs; at most LONGEST.

    A bit of an integer, and a list, count for as much as a round, so that measuring and multiplying never take long.
    """
    count, unseen = 0, list(values)
    while unseen:
        value = unseen.pop()
        if isinstance(value, int):
            count += value.bit_length() * ROUND
        elif isinstance(value, Collection):
            count += len(value)
            if not isinstance(value, str | bytes | range):
                count += ROUND
                _require(count)
                unseen.extend(chain(value, value.values()) if isinstance(value, Mapping) else value)
    _require(count)
    return count


def _growth(name: str, given: Sequence[Any]) -> int:
    """At most how many characters an operator, a method or a filter makes, for those that make more than they take."""
    first, *others = given
    match name:
        case "*":
            counts = [each for each in given if isinstance(each, int)]
            repeated = [each for each in given if not isinstance(each, int)]
            return _size(*repeated) * max([1, *counts]) if repeated else _size(*counts)
        case "**":
            return _size(first) * abs(others[0]) if all(isinstance(each, int) for each in given) else 0
        case "replace" if len(others) >= 2:
            return str(first).count(str(others[0])) * len(str(others[1]))
        case "join":
            return len(first) * len(others[0])
        case "format" | "format_map":
            parts = [(field, form or "") for _, field, form, _ in Formatter().parse(first) if field is not None]
            is_nested = any("{" in form for _, form in parts)
            return LONGEST + 1 if is_nested else _filled(len(parts), " ".join(form for _, form in parts), others)
        case "%" if isinstance(first, str | bytes):
            text = str(first)
            stars = sum(abs(each) for each in _elements(others[0]) if isinstance(each, int)) if "*" in text else 0
            return stars + _filled(text.count("%"), text, others)
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "batch" | "slice":
            return max([0, *(each for each in others if isinstance(each, int))])
        case "expandtabs" | "indent" | "translate" | "urlize" | "wordwrap":
            return (1 + _size(first)) * max([1, *(each if isinstance(each, int) else _size(each) for each in others)])
    return 0


def _filled(fields: int, widths: str, given: Sequence[Any]) -> int:
    numbers = re.findall(r"\d+", widths)
    return fields * _size(*given) + sum(int(each) if len(each) < 9 else LONGEST + 1 for each in numbers)


def _elements(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else value.values() if isinstance(value, Mapping) else (value,)


def _joined(parts: Iterable[str]) -> str:
    found, length = [], 0
    for part in parts:
        length += len(part)
        _require(length)
        found.append(part)
    return "".join(found)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment as transformers sets it up, which templates are written for, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=_written,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _limited_filter(name, each) for name, each in self.filters.items()} | _COUNTERS
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _Dictionary(), "namespace": _Namespace}
        del self.globals["lipsum"]  # random text, as long as one likes

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _require(_growth(operator, (left, right)))
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            if method.__name__ == "join":
                args = tuple(map(list, args))
            given = (owner, *args, *kwargs.values())
            _size(*given)
            _require(_growth(method.__name__, given))
        return _checked(super().call(__context, __obj, *args, **kwargs))


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    own = 1 if hasattr(made, "jinja_pass_arg") else 0  # an argument that is jinja2's own comes first

    @wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _spend(CALL)
        given = [*args[own:], *kwargs.values()]
        _size(*given)
        match name:
            case "join":
                given[0] = list(given[0])
                _size(given[0])
                _require(_growth("join", (str(given[1]) if len(given) > 1 else "", given[0])))
                args = (*args[:own], given[0], *args[own + 1 :])
            case "format":
                _require(_growth("%", (str(given[0]), tuple(given[1:]))))
            case "replace" if kwargs:
                raise TypeError("replace takes no arguments by name here")
            case _:
                _require(_growth(name, given))
        return _checked(made(*args, **kwargs))

    return limited


@jinja2.pass_context  # else it would run once, while the template is compiled
def _count_round(context: Context, characters: int) -> bool:
    _spend(ROUND + characters)
    return True


def _concatenated(values: list[Any]) -> str:
    _size(values)
    return _checked("".join(map(str, values)))


_COUNTERS = {" round": _count_round, " concatenated": _concatenated, " made": _checked}  # no template can name them


class _Counted(NodeTransformer):
    """Counts what jinja2 offers no hook for: a loop's rounds, `~`, and slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        counter = _filter(" round", nodes.Const(written), node)
        if node.test:
            node.test = nodes.And(counter, node.test)
        else:
            node.body.insert(0, nodes.ExprStmt(counter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(" concatenated", nodes.List(node.nodes), node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(" made", node, node) if isinstance(node.arg, nodes.Slice) else node


def _filter(name: str, value: nodes.Expr, beside: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=beside.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here the tag is ignored and its content kept."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dictionary:
    """`dict` without what else hangs on the class, as in transformers."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """As in transformers: no attribute of a template's making reaches Python's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _require_plain(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _require_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    width = indent if isinstance(indent, int) else len(indent or "")
    _require(width * (LONGEST // ROUND))  # a deep value is indented many times
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
