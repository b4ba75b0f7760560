"""Messages between the judge and the program, over a socket: four bytes of length, then JSON. Plain data only.

A subclass becomes its base type (a Counter becomes a dict). Every other object becomes a stand-in that equals only
itself, so that an object's own `__eq__` stays in the program's process.
"""

import itertools
import json
import os
import struct
from collections.abc import Callable, ItemsView, Iterator, KeysView
from decimal import Decimal
from fractions import Fraction
from typing import Any

ANSWER_BYTES = 1 << 20  # far more than a benchmark's answer; longer ones are not read
LENGTH = struct.Struct(">I")
SMALL = 1 << 63  # larger integers are sent as text: the interpreter refuses the decimal form of a very long one
ITERATED = 10_000  # the most elements taken from an iterator, which may be endless


class ProgramObject:
    """Stands for an object of the program. Only its truth value is known."""

    def __init__(self, is_true: bool) -> None:
        self._is_true = is_true

    def __bool__(self) -> bool:
        return self._is_true


def encode(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind, form in FORMS.items():
        if isinstance(value, kind):
            return form(value)
    return {"object": bool(value)}


def _all(values: Any) -> list[Any]:
    return [encode(value) for value in values]


def _pairs(value: dict[Any, Any]) -> dict[str, Any]:
    return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}


# The first kind that fits is used.
FORMS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int(value) if abs(value) < SMALL else {"int": hex(value)},
    float: float,
    str: str,
    list: _all,
    tuple: lambda value: {"tuple": _all(value)},
    dict: _pairs,
    set: lambda value: {"set": _all(value)},
    frozenset: lambda value: {"frozenset": _all(value)},
    KeysView: lambda value: {"set": _all(value)},
    ItemsView: lambda value: {"set": _all(value)},
    bytes: lambda value: {"bytes": value.hex()},
    bytearray: lambda value: {"bytes": value.hex()},
    complex: lambda value: {"complex": [value.real, value.imag]},
    range: lambda value: {"range": _all([value.start, value.stop, value.step])},
    Decimal: lambda value: {"decimal": str(value)},
    Fraction: lambda value: {"fraction": _all([value.numerator, value.denominator])},
    Iterator: lambda value: {"iterator": _all(itertools.islice(value, ITERATED))},
}

READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda data: int(data, 16),
    "tuple": lambda data: tuple(_read_all(data)),
    "dict": lambda data: {decode(key): decode(each) for key, each in data},
    "set": lambda data: set(_read_all(data)),
    "frozenset": lambda data: frozenset(_read_all(data)),
    "bytes": bytes.fromhex,
    "complex": lambda data: complex(*data),
    "range": lambda data: range(*_read_all(data)),
    "decimal": Decimal,
    "fraction": lambda data: Fraction(*_read_all(data)),
    "iterator": lambda data: iter(_read_all(data)),
    "object": lambda data: ProgramObject(data is True),
}


def decode(data: Any) -> Any:
    """The value from its encoded form. Anything else raises an error; nothing in it is ever executed."""
    if isinstance(data, list):
        return _read_all(data)
    if isinstance(data, dict):
        ((kind, content),) = data.items()
        return READERS[kind](content)
    return data


def _read_all(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("no list")
    return [decode(each) for each in data]


class Cut(BaseException):
    """The other side is gone, or sent something that is no message. Tests that catch `Exception` do not catch this."""


class Channel:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        left = memoryview(LENGTH.pack(len(data)) + data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError:
                raise Cut("ended without an answer") from None

    def receive(self, at_most: int) -> Any:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > at_most:
            raise Cut(f"its answer is longer than {at_most} bytes")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError, MemoryError):
            raise Cut("its answer is no value") from None

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = os.read(self._descriptor, min(count, 1 << 16))
            except OSError:
                part = b""
            if not part:
                raise Cut("ended without an answer")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
