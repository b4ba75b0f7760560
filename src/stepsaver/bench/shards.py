"""A run divided over several processes: every shard runs all configs on its share of the chunks.

A shard writes to folders of its own, and moves its chunks to the results when it has all of them. The last one to do so
finds every chunk there and writes the summaries. If a shard dies for good, the next run takes over what it left, so no
chunk is lost or counted twice.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsaver.bench.cells import CellRun, first_difference
from stepsaver.bench.session import Chunk
from stepsaver.bench.store import (
    IDENTITY,
    SAMPLES,
    TRACE,
    CellFiles,
    open_cell_files,
    read_cell_files,
    read_run,
)
from stepsaver.engine.errors import UsageError

FOLDER = "shards"


@dataclass(frozen=True)
class Share:
    """The share of one process: every `count`-th chunk, from the `index`-th on."""

    label: str  # of the run that it is part of
    index: int = 0
    count: int = 1
    is_alone: bool = True  # no other shard runs on this machine

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def chunks(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if chunk.number % self.count == self.index]


def write_apart(cells: dict[str, CellRun], share: Share) -> None:
    """Makes the cells write to folders of this shard."""
    for cell in cells.values():
        folder = cell.stored.folder / FOLDER / f"{share.label}-{share.index}"
        cell.written = open_cell_files(folder, cell.identity, cell.stored.run_id)


def merge(shard: CellFiles, whole: CellFiles) -> None:
    """Moves a shard's chunks and timings to the results, one synced write per chunk. What is there has to agree."""
    own_timings = {each.chunk: each for each in shard.own_timings}
    for chunk, records in sorted(shard.records.items()):
        if chunk not in whole.records:
            whole.append_chunk(chunk, records, own_timings[chunk])
        elif difference := first_difference(records, whole.records[chunk]):
            raise UsageError(f"{shard.folder} has another answer to {difference} than {whole.folder}")
    known = {each.key for each in whole.timings}
    for timing in shard.timings:
        if timing.key not in known:
            whole.append_timing(timing)
    _remove(shard.folder, whole.folder)


def _remove(folder: Path, target: Path) -> None:
    """Removes the folder of a shard that is merged. Files that were set aside in it are kept."""
    for path in folder.iterdir():
        if path.name not in (SAMPLES, TRACE, IDENTITY) and path.suffix != ".writing":
            path.rename(target / path.name)
    shutil.rmtree(folder)


def merge_what_was_left(results: Path) -> list[str]:
    """Takes over what shards of earlier runs left. Returns notes on what was set aside. Nobody else may be running."""
    notes = []
    for folder in sorted(results.glob(f"*/*/{FOLDER}/*")):
        target = folder.parent.parent
        whole, shard = read_run(target), read_run(folder)
        if whole is None or shard is None or whole.run_id != shard.run_id:
            continue  # not from the run that is stored here
        cells = [read_cell_files(each, whole.run_id, repair=True) for each in (folder, target)]
        merge(*cells)
        notes += [note for files in cells for note in files.notes]
    return notes


def stored_with_shards(folder: Path) -> list[CellFiles]:
    """Reads what is stored of a config: merged, and in shards that are not merged yet. Changes nothing."""
    stored = read_run(folder)
    if stored is None:
        return []
    apart = [
        path for path in sorted(folder.glob(f"{FOLDER}/*")) if (run := read_run(path)) and run.run_id == stored.run_id
    ]
    return [read_cell_files(each, stored.run_id) for each in (folder, *apart)]
