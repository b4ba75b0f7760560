"""Forwards against llama.cpp: the file written for it, and the calls, which a module of the same functions counts."""

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import against_llama
from benchmarks.gguf import facts, tensors, write_random
from benchmarks.shapes import SHAPES
from benchmarks.speed import main
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from tests.conftest import tiny_config


class Reader:
    """Reads the format as its specification says, field by field."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.content[self.at - length : self.at].decode()

    def value(self) -> Any:
        kind = self.take("I")
        return self.text() if kind == 8 else self.take({4: "I", 6: "f"}[kind])


@pytest.mark.parametrize("tied", [True, False])
def test_the_file_says_what_was_written(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tied=tied)
    write_random(config, tmp_path / "model.gguf")
    reader = Reader((tmp_path / "model.gguf").read_bytes())
    assert (reader.content[:4], reader.at) == (b"GGUF", 0)
    reader.at = 4
    version, tensor_count, fact_count = reader.take("I"), reader.take("Q"), reader.take("Q")
    assert version == 3
    read = {reader.text(): reader.value() for _ in range(fact_count)}
    assert read == {name: pytest.approx(value) for name, value in facts(config).items()}
    found = {}
    for _ in range(tensor_count):
        name, dimensions = reader.text(), reader.take("I")
        shape = tuple(reader.take("Q") for _ in range(dimensions))[::-1]
        found[name] = (shape, {0: np.float32, 1: np.float16}[reader.take("I")], reader.take("Q"))
    start = -(-reader.at // 32) * 32
    assert {name: shape for name, (shape, _, _) in found.items()} == {
        plan.name: plan.shape for plan in tensors(config, torch.float16)
    }
    assert ("output.weight" in found) is not tied
    for name, (shape, kind, offset) in found.items():
        assert offset % 32 == 0
        numbers = np.frombuffer(reader.content, kind, int(np.prod(shape)), start + offset)
        assert np.isfinite(numbers).all()
        assert ("norm" in name) == (numbers == 1).all()
    name, (shape, kind, offset) = max(found.items(), key=lambda each: each[1][2])
    assert len(reader.content) == -(-(start + offset + int(np.prod(shape)) * np.dtype(kind).itemsize) // 32) * 32


def test_a_file_has_as_many_numbers_as_a_model_of_the_shape() -> None:
    config = tiny_config()
    written = sum(torch.Size(plan.shape).numel() for plan in tensors(config, torch.float16))
    model = random_model(config, dtype=torch.float64)
    assert written == sum(parameter.numel() for parameter in model.parameters())


class FakeLlama:
    """The functions of llama-cpp-python that are called; it notes what it is asked to run."""

    def __init__(self, loads: bool = True) -> None:
        self.loads, self.decoded, self.open = loads, [], 0  # type: ignore[var-annotated]

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, _: object) -> object:
        assert Path(path.decode()).read_bytes()[:4] == b"GGUF"
        self.open += self.loads
        return object() if self.loads else None

    def llama_init_from_model(self, _: object, settings: SimpleNamespace) -> object:
        self.settings = settings
        self.open += 1
        return object()

    def llama_get_memory(self, _: object) -> object:
        return object()

    def llama_batch_init(self, rows: int, embedding: int, sequences: int) -> SimpleNamespace:
        assert (embedding, sequences) == (0, 1)
        names = ("token", "pos", "n_seq_id", "logits")
        made = {name: [None] * rows for name in names} | {"seq_id": [[None] for _ in range(rows)]}
        return SimpleNamespace(n_tokens=0, **made)

    def llama_decode(self, _: object, batch: SimpleNamespace) -> int:
        assert len(batch.token) == batch.n_tokens
        assert batch.logits == [1] * batch.n_tokens
        assert batch.seq_id == [[0]] * batch.n_tokens
        self.decoded.append((batch.pos[0], batch.pos[-1]))
        return 0

    def llama_synchronize(self, _: object) -> None: ...

    def llama_memory_seq_rm(self, _: object, sequence: int, first: int, last: int) -> None:
        assert (sequence, first, last) == (0, against_llama.CONTEXT, -1)

    def llama_batch_free(self, _: object) -> None: ...

    def llama_free(self, _: object) -> None:
        self.open -= 1

    llama_model_free = llama_free


def test_both_run_the_same_rows_after_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, against_llama.MODULE, fake)
    model = random_model(tiny_config(), dtype=torch.float32)
    table = against_llama.measure_against_llama(model, 2, rows=(1, 5))
    assert [row["rows"] for row in table] == [1, 5]
    assert all(row["ratio"] == pytest.approx(row["ours_ms"] / row["llama_cpp_ms"]) for row in table)
    context = against_llama.CONTEXT
    assert fake.decoded == [(0, context - 1), *[(context, context)] * 3, *[(context, context + 4)] * 3]
    assert fake.settings.n_threads == torch.get_num_threads()
    assert fake.open == 0


def test_a_model_that_it_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, against_llama.MODULE, FakeLlama(loads=False))
    with pytest.raises(UsageError, match="does not load"):
        against_llama.measure_against_llama(random_model(tiny_config(), dtype=torch.float32), 1, rows=(1,))


@pytest.mark.parametrize(("engine", "says"), [("vllm", "llama.cpp"), ("llama.cpp", "llama-cpp-python")])
def test_another_engine_or_a_missing_one_is_one_line(
    engine: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, against_llama.MODULE, None)
    assert main(["--against", engine]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("threads", ["0", "-1", "1000000"])
def test_impossible_numbers_of_threads_are_refused(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--threads", threads]) == 2
    assert f"--threads {threads} is not from 1 to" in capsys.readouterr().err


def test_the_command_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, against_llama.MODULE, FakeLlama())
    monkeypatch.setitem(SHAPES, "135M", tiny_config(block_size=16))
    small = ["--batch-size", "1", "--repeats", "1", "--new-tokens", "2"]
    assert main(["--shape", "135M", "--against", "llama.cpp", *small, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["engine"], row["rows"]) for row in document["against"]] == [("llama.cpp", n) for n in (1, 8, 32)]
