"""Local files by the names and in the formats that people have them in."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.local_data import DataSource, find_files, read_rows, read_split

GSM8K = DataSource("gsm8k", "openai/gsm8k", "main")
ANATOMY = DataSource("mmlu_anatomy", "cais/mmlu", "anatomy")
ALGEBRA = DataSource("minerva_math_algebra", "EleutherAI/hendrycks_math", "algebra")


@pytest.mark.parametrize(
    ("source", "split", "name"),
    [
        (GSM8K, "test", "gsm8k_test.jsonl"),
        (GSM8K, "train", "gsm8k_train_200.jsonl"),
        (GSM8K, "test", "gsm8k/main/test-00000-of-00001.parquet"),
        (ANATOMY, "dev", "mmlu/anatomy_dev.csv"),
        (ANATOMY, "test", "anatomy_test.csv"),
        (DataSource("ifeval", "google/IFEval", None), "train", "ifeval.jsonl"),
        (DataSource("humaneval", "openai/openai_humaneval", None), "test", "HumanEval.jsonl.gz"),
        (DataSource("gpqa_main_n_shot", "Idavidrein/gpqa", "gpqa_main"), "train", "gpqa_main.csv"),
        (ALGEBRA, "test", "hendrycks_math/algebra/test.json"),
    ],
)
def test_files_are_found(tmp_path: Path, source: DataSource, split: str, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert find_files(tmp_path, source, split, is_evaluated=True) == [path]


def test_shards_are_one_split_and_other_copies_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    for shard in (0, 1):
        rows = [{"question": f"q{shard}", "answer": "#### 1"}]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"gsm8k/main/test-0000{shard}-of-00002.parquet"
        )
    rows = read_split(tmp_path, GSM8K, "test", is_evaluated=True)
    assert [row["question"] for row in rows or []] == ["q0", "q1"]
    for count in (8, 200):
        (tmp_path / f"gsm8k_train_{count}.jsonl").touch()
    with pytest.raises(UsageError, match="train is ambiguous"):
        find_files(tmp_path, GSM8K, "train", is_evaluated=False)


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "q"}\n')
    assert read_split(tmp_path, GSM8K, "train", is_evaluated=False) is None
    assert read_split(tmp_path, GSM8K, "test", is_evaluated=True) == [{"question": "q"}]


@pytest.mark.parametrize(
    "text",
    [
        "Which?,w,x,y,z,C\n",
        "question,A,B,C,D,answer\nWhich?,w,x,y,z,C\n",
        "question,choice0,choice1,choice2,choice3,answer\nWhich?,w,x,y,z,2\n",
    ],
)
def test_mmlu_as_its_authors_and_others_write_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "anatomy_test.csv").write_text(text)
    rows = read_split(tmp_path, ANATOMY, "test", is_evaluated=True)
    assert rows == [{"question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 2}]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"{broken", "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.csv", b"one,two\n1\n", "does not have the 2 fields"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        read_rows(tmp_path / name)


def test_rows_with_line_separators_inside(tmp_path: Path) -> None:
    """U+2028 ends a line for `str.splitlines`, and occurs in real documents."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_rows(tmp_path / "a.jsonl") == [{"text": "a\u2028b"}]


def test_empty_and_wrong_answers(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").touch()
    with pytest.raises(UsageError, match="has no documents"):
        read_split(tmp_path, GSM8K, "test", is_evaluated=True)
    (tmp_path / "anatomy_test.csv").write_text("Which?,w,x,y,z,E\n")
    with pytest.raises(UsageError, match="no four choices with an answer"):
        read_split(tmp_path, ANATOMY, "test", is_evaluated=True)
