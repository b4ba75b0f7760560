"""Results on disk: whole chunks or nothing, whatever happens to the file."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stepsaver.bench import durable
from stepsaver.bench.durable import exclusive
from stepsaver.bench.store import SAMPLES, SCORES, TRACE, CellFiles, open_cell_files, read_cell_files
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.evaluate import DocumentScore
from stepsaver.evaluation.records import RequestKey, RequestRecord
from tests.bench.made_up import PROVENANCE, identity, summary, timing


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


def filled(folder: Path, chunks: int = 3) -> Path:
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    for chunk in range(chunks):
        cell.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk))
    return folder


def test_chunks_read_back(tmp_path: Path) -> None:
    cell = read_cell_files(filled(tmp_path / "cell"), "run")
    assert sorted(cell.records) == [0, 1, 2]
    assert [each.key.document for each in cell.all_records] == [0, 1, 2, 3, 4, 5]
    assert cell.all_records[3] == record(3)
    assert [each.chunk for each in cell.timings] == [0, 1, 2]


def test_of_a_chunk_timed_again_and_again_the_last_timing_counts(tmp_path: Path) -> None:
    cell = open_cell_files(filled(tmp_path / "cell"), identity(), "run", provenance=PROVENANCE)
    for session, instead in (("a", "s"), ("b", "a"), ("c", "b")):
        cell.append_timing(timing(1, session=session, instead_of=instead, seconds=2.0))
    cell.append_timing(timing(1, session="beside another config"))
    read = read_cell_files(tmp_path / "cell", "run")
    assert [(each.chunk, each.session) for each in read.own_timings] == [(0, "s"), (1, "c"), (2, "s")]
    counting = [(0, "s"), (2, "s"), (1, "c"), (1, "beside another config")]
    assert [each.key for each in read.counting_timings] == counting
    assert len(read.timings) == 7, "all stay on record"


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
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    done = sorted(cell.records)
    assert done == list(range(content[: content[:length].rfind(b"\n") + 1].count(marker)))
    assert len(cell.own_timings) == len(done)
    for chunk in range(len(done), 3):
        cell.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk))
    assert (folder / SAMPLES).read_bytes() == samples
    assert read_cell_files(folder, "run").records == cell.records


def test_a_damaged_line_takes_its_chunk_with_it_and_is_kept_for_looking_at(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    lines = (folder / SAMPLES).read_bytes().splitlines(keepends=True)
    lines[5] = b"\x00\xff" + lines[5][2:]
    (folder / SAMPLES).write_bytes(b"".join(lines))
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    assert sorted(cell.records) == [0, 2]
    assert [path.read_bytes() for path in cell.damaged] == [b"".join(lines)]
    assert "chunk 1 is run again" in cell.notes[0]
    cell.append_chunk(1, [record(2), record(3)], timing(1, session="t"))
    again = read_cell_files(folder, "run")
    assert (sorted(again.records), again.faults) == ([0, 1, 2], [])
    assert not open_cell_files(folder, identity(), "run", provenance=PROVENANCE).damaged


def test_samples_without_their_trace_are_not_trusted(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    lines = (folder / TRACE).read_bytes().splitlines(keepends=True)
    (folder / TRACE).write_bytes(b"".join([*lines[:2], b"{}\n", lines[3]]))
    assert sorted(read_cell_files(folder, "run").records) == [0]
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    assert [path.name.split(".damaged")[0] for path in cell.damaged] == [TRACE, SAMPLES]


@st.composite
def altered_lines(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """The lines of a file with some of them taken out, put in, doubled, moved or changed in one character."""
    found = list(lines)
    for _ in range(draw(st.integers(1, 3))):
        here, there = draw(st.integers(0, len(found) - 1)), draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["take out", "put in", "swap", "change"]))
        if kind == "take out" and len(found) > 1:
            del found[here]
        elif kind == "put in":
            found.insert(here, lines[there])
        elif kind == "swap":
            there = min(there, len(found) - 1)
            found[here], found[there] = found[there], found[here]
        else:
            place = draw(st.integers(0, len(found[here]) - 2))
            found[here] = found[here][:place] + draw(st.sampled_from([b"0", b" ", b'"'])) + found[here][place + 1 :]
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_however_lines_are_altered_none_that_is_false_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = filled(tmp_path_factory.mktemp("altered") / "cell")
    before = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    before.write_scores([DocumentScore("t", document, 1.0) for document in range(6)])
    before.write_summary(summary(run_id="run"))
    assert not read_cell_files(folder, "run").faults
    path = folder / data.draw(st.sampled_from([SAMPLES, TRACE, SCORES]))
    lines = path.read_bytes().splitlines(keepends=True)
    altered = data.draw(altered_lines(lines))
    path.write_bytes(b"".join(altered))
    if altered != lines:
        assert read_cell_files(folder, "run").faults
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    assert {chunk: before.records[chunk] for chunk in cell.records} == cell.records
    assert all(each in before.timings for each in cell.timings)
    for chunk in {0, 1, 2} - cell.records.keys():
        cell.append_chunk(chunk, before.records[chunk], timing(chunk, session="again"))
    again = read_cell_files(folder, "run")
    assert (again.records, again.faults) == (before.records, [])


def test_a_chunk_stored_twice_is_not_hidden(tmp_path: Path) -> None:
    cell = open_cell_files(tmp_path / "cell", identity(), "run", provenance=PROVENANCE)
    for _ in range(2):
        cell.append_chunk(0, [record(0)], timing(0))
    assert len(read_cell_files(tmp_path / "cell", "run").all_records) == 2


def test_another_run_and_force_set_results_aside(tmp_path: Path) -> None:
    folder = filled(tmp_path / "cell")
    other = open_cell_files(folder, identity(layers=2), "other", provenance=PROVENANCE)
    assert not other.records
    before = tmp_path / "previous" / "cell-run"
    assert sorted(read_cell_files(before, "run").records) == [0, 1, 2]
    why = "was of another run (differs in layers)"
    assert other.notes == [f"{folder} {why}: what was stored is set aside as {before}"]
    forced = open_cell_files(folder, identity(layers=2), "other", provenance=PROVENANCE, force=True)
    assert not forced.records
    before = tmp_path / "previous" / "cell-other"
    assert before.is_dir()
    assert forced.notes == [f"{folder} is run again: what was stored is set aside as {before}"]
    assert open_cell_files(folder, identity(layers=2), "other", provenance=PROVENANCE).notes == []
    assert json.loads((folder / "run.json").read_text())["run_id"] == "other"


def test_a_second_runner_is_told(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_a_full_disk_loses_nothing_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "cell", chunks=1)
    before = (folder / SAMPLES).read_bytes()
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        cell.append_chunk(1, [record(2)], timing(1))
    assert (folder / SAMPLES).read_bytes() == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", [10, 300, 3000, 5000, 9000])
def test_a_write_that_does_not_fit_leaves_no_torn_tail(small_disk: Path, size: int) -> None:
    """Whether it is smaller or larger than a buffer: what is in a buffer must not follow when the file is closed."""
    cell = open_cell_files(small_disk / "cell", identity(), "run", provenance=PROVENANCE)
    cell.append_chunk(0, [record(0)], timing(0))
    for room in (0, 1, 2, 3):  # pages that are left
        (small_disk / "filler").unlink(missing_ok=True)
        fill(small_disk / "filler", pages_left=room)
        with pytest.raises(UsageError, match="No space left"):
            append_until_full(cell, first=100 * room + 1, size=size)
        for name in (SAMPLES, TRACE):
            assert (cell.folder / name).read_bytes().endswith(b"\n"), "a torn tail"
        stored = read_cell_files(small_disk / "cell", "run")
        assert stored.faults == []
        assert stored.records == cell.records


def append_until_full(cell: CellFiles, first: int, size: int) -> None:
    for chunk in range(first, first + 60):
        one = dataclasses.replace(record(chunk), text="x" * size)
        cell.append_chunk(chunk, [one], timing(chunk, gpu="y" * size))


def fill(path: Path, pages_left: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"z" * page)
        except OSError:
            stream.truncate(max(0, stream.tell() // page - pages_left) * page)


@pytest.mark.parametrize("missing", ["steps", "row_layers", "row_layers_reused", "flops"])
def test_a_kind_of_step_has_all_its_figures(missing: str) -> None:
    """A summary or trace that lacks one is damaged, and no page is made of it."""
    figures = {"steps": 1, "row_layers": 2, "row_layers_reused": 0, "flops": 3.0}
    assert timing(0, by_kind={"full": figures}).by_kind["full"]["flops"] == 3
    del figures[missing]
    with pytest.raises(ValidationError, match=f"a kind of step lacks {missing}"):
        timing(0, by_kind={"full": figures})
