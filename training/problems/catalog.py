"""The embedded tasks: which function makes their problems, and the committed test files."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stepsaver.evaluation.embedded import DATA_FOLDER
from training.problems import instructions, questions, word_problems
from training.problems.problem import Maker, Problem, distinct_problems

MAKERS: dict[str, Maker] = {
    word_problems.TASK: word_problems.make_word_problem,
    questions.TASK: questions.make_question,
    instructions.TASK: instructions.make_instruction,
}
LARGE, FINAL = f"{word_problems.TASK}_large", f"{word_problems.TASK}_final"


@dataclass(frozen=True)
class EvaluationFile:
    """How a task's test file is made: which maker's problems, which of them and how many."""

    problems_of: str
    count: int
    seed: int = 2026
    apart_from: tuple[str, ...] = ()  # tasks: no problem of their test files is used, not even reworded
    is_compact: bool = False  # keep only the last line of a worked answer, which is what counts


EVALUATION_FILES = {
    word_problems.TASK: EvaluationFile(word_problems.TASK, 1319),
    questions.TASK: EvaluationFile(questions.TASK, 1040),
    instructions.TASK: EvaluationFile(instructions.TASK, 540),
    LARGE: EvaluationFile(word_problems.TASK, 5120, seed=2027, apart_from=(word_problems.TASK,), is_compact=True),
    FINAL: EvaluationFile(word_problems.TASK, 5120, seed=2028, apart_from=(word_problems.TASK, LARGE), is_compact=True),
}


@cache
def evaluation_problems(task: str) -> tuple[Problem, ...]:
    """The problems of a task's test file, made by its generator."""
    file = EVALUATION_FILES[task]
    taken = {each.identity for other in file.apart_from for each in evaluation_problems(other)}
    make = MAKERS[file.problems_of]
    return tuple(distinct_problems(make, seed=file.seed, split="test", count=file.count, taken=taken))


def evaluation_lines(task: str) -> str:
    """The content of a task's test file."""
    documents = [problem.document for problem in evaluation_problems(task)]
    if EVALUATION_FILES[task].is_compact:
        documents = [each | {"answer": each["answer"].rpartition("\n")[2]} for each in documents]
    return "".join(json.dumps(document) + "\n" for document in documents)


def write_evaluation_data(folder: Path = DATA_FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task in EVALUATION_FILES:
        (folder / f"{task}.jsonl").write_text(evaluation_lines(task), encoding="utf-8")


if __name__ == "__main__":
    write_evaluation_data()
