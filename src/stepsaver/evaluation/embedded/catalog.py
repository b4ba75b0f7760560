"""The embedded tasks: who makes their problems, and the test files that are committed."""

import json
from pathlib import Path

from stepsaver.evaluation.embedded import DATA_FOLDER, instructions, questions, word_problems
from stepsaver.evaluation.embedded.problem import Maker, Problem, distinct_problems

MAKERS: dict[str, Maker] = {
    word_problems.TASK: word_problems.make_word_problem,
    questions.TASK: questions.make_question,
    instructions.TASK: instructions.make_instruction,
}
TEST_COUNTS = {word_problems.TASK: 1319, questions.TASK: 1040, instructions.TASK: 540}
TEST_SEED = 2026


def evaluation_problems(task: str) -> list[Problem]:
    """The problems of a task's test file, as the generator makes them."""
    return distinct_problems(MAKERS[task], seed=TEST_SEED, split="test", count=TEST_COUNTS[task])


def evaluation_lines(task: str) -> str:
    """The content of a task's test file."""
    return "".join(json.dumps(problem.document) + "\n" for problem in evaluation_problems(task))


def write_evaluation_data(folder: Path = DATA_FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task in MAKERS:
        (folder / f"{task}.jsonl").write_text(evaluation_lines(task), encoding="utf-8")


if __name__ == "__main__":
    write_evaluation_data()
