"""Small rows of our own in the formats of the public benchmarks."""

import csv
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GSM8K_TEST = [
    {"question": "Ada has 3 pens and buys 4 more. How many pens has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A box holds 1,000 nails. How many are in two?", "answer": "2 * 1000 = 2000\n#### 2,000"},
    {"question": "Ben owes 5 coins and pays 2. What is his balance?", "answer": "-5 + 2 = -3\n#### -3"},
]
GSM8K_TRAIN = [
    {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(1, 9)
]
MMLU_TEST = [
    ["Which bone is in the thigh?", "Femur", "Ulna", "Tibia", "Radius", "A"],
    ["How many chambers has a heart?", "Two", "Three", "Four", "Five", "C"],
]
MMLU_DEV = [[f"Example {n}?", "w", "x", "y", "z", "ABCD"[n % 4]] for n in range(5)]
MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
MATH = [
    {
        "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
        "solution": "It is $\\boxed{\\frac{3}{4}}$.",
        "level": "Level 1",
    },
    {"problem": "Solve $2x = 6$.", "solution": "So $x = \\boxed{3}$.", "level": "Level 1"},
]
GPQA = [
    {
        "Question": f"Which of these is thing number {n}?",
        "Correct Answer": f"thing {n}",
        **{f"Incorrect Answer {i}": f"other {n}-{i}" for i in (1, 2, 3)},
    }
    for n in range(40)
]
IFEVAL = [
    {"key": 1, "prompt": "Write without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 2,
        "prompt": "Write at least two sentences.",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "at least", "num_sentences": 2}],
    },
    {
        "key": 3,
        "prompt": "Write in English, all lowercase.",
        "instruction_id_list": ["change_case:english_lowercase"],
        "kwargs": [{}],
    },
]
HUMANEVAL = [
    {
        "task_id": "Own/0",
        "prompt": 'def double(x: int) -> int:\n    """ Twice x. """\n',
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
        "entry_point": "double",
    },
    {
        "task_id": "Own/1",
        "prompt": 'def first(words: list) -> str:\n    """ The first word. """\n',
        "canonical_solution": "    return words[0]\n",
        "test": "def check(candidate):\n    assert candidate(['a', 'b']) == 'a'\n",
        "entry_point": "first",
    },
]


def write_rows(folder: Path) -> Path:
    """A data folder as a user would have it: the authors' file names and formats."""
    _jsonl(folder / "gsm8k_test.jsonl", GSM8K_TEST)
    _jsonl(folder / "gsm8k_train_8.jsonl", GSM8K_TRAIN)
    _jsonl(folder / "ifeval.jsonl", IFEVAL)
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(_lines(HUMANEVAL).encode()))
    for split, rows in (("test", MMLU_TEST), ("dev", MMLU_DEV)):
        _csv(folder / "mmlu" / f"anatomy_{split}.csv", rows)
    for subject in MATH_SUBJECTS:
        _jsonl(folder / "hendrycks_math" / subject / "test.jsonl", MATH)
    _csv(folder / "gpqa_main.csv", [list(GPQA[0]), *(list(row.values()) for row in GPQA)])
    return folder


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(rows), encoding="utf-8")


def _csv(path: Path, rows: Iterable[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
