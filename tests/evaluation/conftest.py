"""Own rows in the formats of the public benchmarks, a byte tokenizer, and no way out to the network."""

import socket
from pathlib import Path

import pytest

from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.byte_tokenizer import write_byte_tokenizer
from tests.evaluation.own_rows import write_rows


@pytest.fixture(autouse=True)
def network_attempts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing here may need the network. Attempts are refused and collected."""
    attempts: list[object] = []

    def refuse(self: socket.socket, address: object) -> None:
        attempts.append(address)
        raise OSError("tests have no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: refuse(None, arguments[:2]))  # type: ignore[arg-type]
    return attempts


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data"))
