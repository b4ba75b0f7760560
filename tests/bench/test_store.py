"""Results on disk: whole chunks or nothing, whatever happens to the file."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.bench import store
from stepsaver.bench.store import SAMPLES, TRACE, exclusive, open_cell, read_cell
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestKey, RequestRecord


def record(document: int) -> RequestRecord:
    return RequestRecord(
        RequestKey("t", document, 0, 0),
        "generation",
        "d",
        prompt_tokens=3,
        tokens_cut=0,
        ids=(1, 2, document),
        text="é\n",
    )


def timing(chunk: int) -> dict:
    return {"chunk": chunk, "session": "s", "seconds": 1.0}


def filled(folder: Path, chunks: int = 3) -> Path:
    cell = open_cell(folder, {"a": 1}, "run")
    for chunk in range(chunks):
        cell.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk))
    return folder


def test_chunks_read_back(tmp_path: Path) -> None:
    cell = read_cell(filled(tmp_path / "cell"), "run")
    assert sorted(cell.records) == [0, 1, 2]
    assert [each.key.document for each in cell.all_records] == [0, 1, 2, 3, 4, 5]
    assert cell.all_records[3] == record(3)
    assert [each["chunk"] for each in cell.timings] == [0, 1, 2]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_keeps_its_whole_chunks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = filled(tmp_path_factory.mktemp("cut") / "cell")
    path = folder / data.draw(st.sampled_from([SAMPLES, TRACE]))
    samples, content = (folder / SAMPLES).read_bytes(), path.read_bytes()
    length = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:length])
    marker = b"chunk_end" if path.name == SAMPLES else b"chunk"
    cell = open_cell(folder, {"a": 1}, "run")
    done = sorted(cell.records)
    assert done == list(range(content[: content[:length].rfind(b"\n") + 1].count(marker)))
    assert len(cell.own_timings) == len(done)
    for chunk in range(len(done), 3):
        cell.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk))
    assert (folder / SAMPLES).read_bytes() == samples
    assert read_cell(folder, "run").records == cell.records


def test_a_damaged_line_ends_what_is_trusted_and_is_kept_for_looking_at(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True)
    lines[4] = b"\x00\xff" + lines[4][2:]
    (folder / SAMPLES).write_bytes(b"".join(lines))
    cell = open_cell(folder, {"a": 1}, "run")
    assert sorted(cell.records) == [0]
    assert [path.read_bytes() for path in cell.damaged] == [b"".join(lines)]
    assert not open_cell(folder, {"a": 1}, "run").damaged


def test_samples_without_their_trace_are_not_trusted(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    lines = (folder / TRACE).read_bytes().splitlines(keepends=True)
    (folder / TRACE).write_bytes(lines[0] + b"{}\n" + lines[2])
    assert sorted(read_cell(folder, "run").records) == [0]
    cell = open_cell(folder, {"a": 1}, "run")
    assert [path.name.split(".damaged")[0] for path in cell.damaged] == [TRACE, SAMPLES]


def test_a_chunk_stored_twice_is_not_hidden(tmp_path: Path) -> None:
    cell = open_cell(tmp_path / "cell", {"a": 1}, "run")
    for _ in range(2):
        cell.append_chunk(0, [record(0)], timing(0))
    assert len(read_cell(tmp_path / "cell", "run").all_records) == 2


def test_another_run_and_force_set_results_aside(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    assert not open_cell(folder, {"a": 2}, "other").records
    assert sorted(read_cell(tmp_path / "previous" / "cell-run", "run").records) == [0, 1, 2]
    assert not open_cell(folder, {"a": 2}, "other", force=True).records
    assert (tmp_path / "previous" / "cell-other").is_dir()
    assert json.loads((folder / "run.json").read_text())["run_id"] == "other"


def test_a_second_runner_is_told(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_a_full_disk_loses_nothing_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "cell", chunks=1)
    before = (folder / SAMPLES).read_bytes()
    cell = open_cell(folder, {"a": 1}, "run")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        cell.append_chunk(1, [record(2)], timing(1))
    assert (folder / SAMPLES).read_bytes() == before
