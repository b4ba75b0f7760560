"""Messages between the judge and the program, over a socket: four bytes of length, then JSON."""

import json
import os
import struct
from typing import Any

ANSWER_BYTES = 1 << 20  # far more than a benchmark's answer; longer ones are not read
LENGTH = struct.Struct(">I")


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
