"""A task's documents from local files instead of the hub: JSONL (also gzipped), JSON, parquet and CSV.

Files are not read by `datasets`: its loaders try the network even for local files, and keep a cache.
"""

import csv
import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepsaver.engine.errors import UsageError, shown

EXTENSIONS = (".jsonl.gz", ".jsonl", ".json", ".parquet", ".csv")
SHARD = r"(?:[-_]\d[\w-]*)?"  # `train_200`, `test-00000-of-00001`
# Files that their authors publish without a header. Other copies have a header, which begins with the same name.
COLUMNS = {"cais/mmlu": ("question", "A", "B", "C", "D", "answer")}
FILE_NAMES = {"openai/openai_humaneval": "humaneval"}  # the names of the authors' own files
MMLU_CHOICES = (("A", "B", "C", "D"), ("choice0", "choice1", "choice2", "choice3"))


class DataSource(NamedTuple):
    """How a task names its documents: lm-eval's `task`, `dataset_path` and `dataset_name`."""

    task: str
    dataset_path: str
    dataset_name: str | None

    @property
    def dataset(self) -> str:
        return FILE_NAMES.get(self.dataset_path, self.dataset_path.rpartition("/")[2])


def read_split(folder: Path, source: DataSource, split: str, *, is_evaluated: bool) -> list[dict[str, Any]] | None:
    """The documents of a split, or None if the folder has no file for it."""
    files = find_files(folder, source, split, is_evaluated=is_evaluated)
    if not files:
        return None
    rows = [row for path in files for row in read_rows(path, columns=COLUMNS.get(source.dataset_path))]
    if not rows:
        raise UsageError(f"{files[0]} has no documents")
    for row in rows:
        if not isinstance(row, dict):
            raise UsageError(f"{files[0]}: {shown(row)} is not a document with named fields")
    return [_converted(source, row) for row in rows]


def find_files(folder: Path, source: DataSource, split: str, *, is_evaluated: bool) -> list[Path]:
    """The files of the first stem that has any. Several files are allowed only if they are numbered shards."""
    files = [(_stem(path.relative_to(folder)), path) for path in sorted(folder.rglob("*")) if _is_data(path)]
    for stem in file_stems(source, split, is_evaluated=is_evaluated):
        found = [path for name, path in files if re.fullmatch(re.escape(stem.lower()) + SHARD, name)]
        if len(found) > 1 and not all(re.search(r"-\d+-of-\d+$", _stem(path)) for path in found):
            raise UsageError(f"{source.task}: {split} is ambiguous in {folder}: {', '.join(p.name for p in found)}")
        if found:
            return found
    return []


def file_stems(source: DataSource, split: str, *, is_evaluated: bool) -> list[str]:
    """Names that a split's file may have, nearest to the task's first. A name without a split is the evaluated one."""
    task, dataset, name = source.task, source.dataset, source.dataset_name
    stems = [f"{task}_{split}", f"{task}/{split}"]
    if name:
        stems += [f"{dataset}/{name}/{split}", f"{dataset}/{name}_{split}", f"{name}_{split}"]
    stems += [f"{dataset}_{split}", f"{dataset}/{split}"]
    if is_evaluated:
        stems += [task, *([f"{dataset}/{name}", name] if name else []), dataset]
    return stems


def require_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"data folder {folder} does not exist")
    return folder


def read_rows(path: Path, *, columns: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """All rows of a file. `columns` name the fields of a CSV file without a header."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as lines:
                return _read_csv(lines, columns)
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        if path.suffix == ".json":
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, TypeError, OSError, EOFError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _read_csv(lines: Iterable[str], columns: tuple[str, ...] | None) -> list[dict[str, Any]]:
    rows = list(csv.reader(lines))
    if columns is None or (rows and rows[0][0] == columns[0]):
        columns, rows = tuple(rows[0]) if rows else (), rows[1:]
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"a row does not have the {len(columns)} fields {', '.join(columns)}")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _converted(source: DataSource, row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row to the hub's form: MMLU's CSV files have a column per choice and a letter or digit as the answer,
    the hub's copy has a list and an index.
    """
    if source.dataset_path != "cais/mmlu" or "choices" in row:
        return dict(row)
    names = next((names for names in MMLU_CHOICES if all(name in row for name in names)), None)
    answer = str(row.get("answer", "")).strip()
    index = max("ABCD".find(answer), "0123".find(answer))
    if names is None or len(answer) != 1 or index < 0:
        raise UsageError(f"{source.task}: a row has no four choices with an answer, but {', '.join(row)}")
    return {"question": row["question"], "choices": [row[name] for name in names], "answer": index}


def _is_data(path: Path) -> bool:
    return path.is_file() and path.name.endswith(EXTENSIONS)


def _stem(path: Path) -> str:
    name = path.as_posix().lower()
    return next(name.removesuffix(extension) for extension in EXTENSIONS if name.endswith(extension))
