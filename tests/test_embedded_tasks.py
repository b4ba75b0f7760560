"""The embedded tasks: problems that repeat, that are right, that keep training and test apart, and their tokenizer."""

import json
import re
from collections.abc import Sequence
from itertools import islice, pairwise
from random import Random

import pytest
import yaml
from jinja2 import Template
from tokenizers import Tokenizer

from stepsaver.evaluation.embedded import DATA_FOLDER, TASKS_FOLDER
from stepsaver.evaluation.embedded.instructions import CHECKS, obeys
from training.batches import draw
from training.problems.catalog import (
    EVALUATION_FILES,
    FINAL,
    LARGE,
    MAKERS,
    evaluation_lines,
    evaluation_problems,
)
from training.problems.instructions import KINDS
from training.problems.problem import Problem, problems
from training.problems.questions import LETTERS, SUBJECTS, UNITS
from training.problems.tokenizer import CHAT_TEMPLATE, END, UNKNOWN_ID, build_tokenizer, prompt_text
from training.problems.words import NAMES
from training.recipe import Recipe

TASKS = sorted(MAKERS)
FILES = sorted(EVALUATION_FILES)
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def some_problems(task: str, *, split: str = "train", count: int = 500) -> list[Problem]:
    return list(islice(problems(MAKERS[task], seed=7, split=split), count))


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_problems(task: str) -> None:
    assert some_problems(task) == some_problems(task)
    other = list(islice(problems(MAKERS[task], seed=8, split="train"), 500))
    assert some_problems(task) != other


@pytest.mark.parametrize("task", FILES)
def test_the_committed_test_file_is_what_the_generator_makes(task: str) -> None:
    committed = (DATA_FOLDER / f"{task}.jsonl").read_text(encoding="utf-8")
    assert committed == evaluation_lines(task)
    assert len(committed.splitlines()) == EVALUATION_FILES[task].count


def test_no_training_problem_is_a_test_problem() -> None:
    """Draws as the training does and compares prompts and identities with everything in the test files."""
    tested = {problem for task in FILES for problem in _identities(evaluation_problems(task))}
    prompts = {problem.prompt for task in FILES for problem in evaluation_problems(task)}
    random = Random(3)
    drawn = [draw(random, Recipe(), step=step, split="train") for step in range(20_000)]
    assert {problem.task for problem in drawn} == set(TASKS)
    assert not prompts & {problem.prompt for problem in drawn}
    assert not tested & set(_identities(drawn))


@pytest.mark.parametrize(("one", "others"), [(LARGE, ["mini_gsm8k"]), (FINAL, ["mini_gsm8k", LARGE])])
def test_no_problem_is_in_two_files_of_word_problems(one: str, others: list[str]) -> None:
    """Read from the committed files: neither a question nor, whatever the names and things, a calculation."""
    ours = {each["question"] for each in _committed(one)}
    assert len(_committed(one)) == len(ours) == 5120
    for other in others:
        theirs = {each["question"] for each in _committed(other)}
        assert not ours & theirs
        assert not set(map(_numbers_told, ours)) & set(map(_numbers_told, theirs))


@pytest.mark.parametrize("task", [LARGE, FINAL])
def test_the_larger_files_are_of_the_same_kind_and_keep_the_result_alone(task: str) -> None:
    first, large = (_committed(each) for each in ("mini_gsm8k", task))
    for steps in (2, 3, 4, 5):
        ours, theirs = (sum(each["steps"] == steps for each in file) / len(file) for file in (large, first))
        assert abs(ours - theirs) < 0.04, steps
    for document in large:
        assert document["answer"] == f"#### {solve(document['question'])}"
    assert (DATA_FOLDER / f"{task}.jsonl").stat().st_size < 1_000_000


def _committed(task: str) -> list[dict]:
    return [json.loads(line) for line in (DATA_FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def _numbers_told(question: str) -> str:
    """What a story does with its numbers, without names, things and the words that mean the same."""
    plain = re.sub(r"\b(buys|finds|gets) (\d+) more", r"+\2", question)
    plain = re.sub(r"\b(loses|sells|gives away) (\d+)", r"-\2", plain)
    plain = re.sub(r"\b(\d+) (more|fewer|times)( as many as| than)", lambda m: f"{m[2][0]}{m[1]}", plain)
    return " ".join(re.findall(r"[-+mft]?\d+|coins each|bags", plain))


def _identities(found: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(problem.task, problem.identity) for problem in found]


def test_word_problems_with_the_same_numbers_are_the_same_problem() -> None:
    """The split looks at the calculation, so a test problem with other names and things cannot be trained on."""
    for problem in some_problems("mini_gsm8k"):
        start = re.search(r"has (\d+) ", problem.prompt)
        assert start is not None
        operations = "".join(f"{operator}{operand}" for _, operator, operand, _ in EQUATION.findall(problem.answer))
        assert problem.identity == f"{start[1]}{operations}"


def test_every_worked_answer_is_right() -> None:
    """Runs the worked answer as a program: each line's result is the next line's left side and the last the answer."""
    tested = [*evaluation_problems("mini_gsm8k"), *evaluation_problems(LARGE), *evaluation_problems(FINAL)]
    for problem in [*some_problems("mini_gsm8k", count=3000), *tested]:
        steps = [
            (int(left), operator, int(right), int(result))
            for left, operator, right, result in EQUATION.findall(problem.answer)
        ]
        assert 2 <= len(steps) <= 5
        assert f"has {steps[0][0]} " in problem.prompt
        value = steps[0][0]
        for left, operator, right, result in steps:
            assert left == value
            exact = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operator]
            assert result == exact
            assert 0 < result < 100
            value = result
        assert problem.answer.endswith(f"\n#### {value}")


def test_every_word_problem_says_what_its_answer_does() -> None:
    """Solves the problem from its text alone, without the worked answer."""
    for problem in evaluation_problems("mini_gsm8k"):
        assert problem.answer.endswith(f"#### {solve(problem.prompt)}"), problem


def solve(text: str) -> int:
    have: dict[str, int] = {}
    sentences = re.findall(r"[^.?]+[.?]", text)
    for sentence in (one.strip() for one in sentences[:-1]):
        name, rest = sentence.rstrip(".").split(" ", 1)
        number = int(re.findall(r"\d+", rest)[0])
        if "times as many as" in rest:
            have[name] = have[rest.split()[-1]] * number
        elif "more than" in rest:
            have[name] = have[rest.split()[-1]] + number
        elif "fewer than" in rest:
            have[name] = have[rest.split()[-1]] - number
        elif rest.startswith("has"):
            have[name] = number
        elif "coins each" in rest:
            have[name] *= number
        elif "splits" in rest:
            have[name] //= number
        elif rest.endswith("more"):
            have[name] += number
        else:
            have[name] -= number
    (asked,) = [name for name in NAMES if name in sentences[-1]]
    return have[asked]


def test_questions_have_four_choices_and_the_right_answer() -> None:
    for problem in [*some_problems("mini_mmlu", count=3000), *evaluation_problems("mini_mmlu")]:
        document = problem.document
        assert len(set(document["choices"])) == 4
        assert document["choices"][document["answer"]] == problem.answer
        assert SOLVERS[document["subject"]](problem.prompt, problem.answer), problem


def _right_arithmetic(text: str, answer: str) -> bool:
    left, operator, right, result = EQUATION.findall(answer)[0]
    exact = int(left) + int(right) if operator == "+" else int(left) - int(right)
    return f"{left} {operator} {right}?" in text and int(result) == exact


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _right_comparison(text: str, answer: str) -> bool:
    numbers = _numbers(text)
    return numbers[LETTERS.index(answer)] == (max if "largest" in text else min)(numbers)


def _right_parity(text: str, answer: str) -> bool:
    wanted = 0 if "even" in text else 1
    return [LETTERS[i] for i, number in enumerate(_numbers(text)) if number % 2 == wanted] == [answer]


def _right_counting(text: str, answer: str) -> bool:
    word = re.search(r"times is (\w+) in", text)
    assert word is not None
    return text.split(":")[1].replace("?", "").replace(",", "").split().count(word[1]) == int(answer)


def _right_units(text: str, answer: str) -> bool:
    many, large, rest, small = re.findall(r"(\d+) (\w+) and (\d+) (\w+)\.", text)[0]
    size = next(size for unit, part, size in UNITS if (unit, part) == (large, small))
    return answer == f"It is {int(many) * size + int(rest)} {small}."


def _right_logic(text: str, answer: str) -> bool:
    pairs = re.findall(r"(\w+) is taller than (\w+)\.", text)
    taller, shorter = {one for one, _ in pairs}, {other for _, other in pairs}
    return {answer} == (taller - shorter if "tallest" in text else shorter - taller)


SOLVERS = {
    "arithmetic": _right_arithmetic,
    "comparison": _right_comparison,
    "counting": _right_counting,
    "logic": _right_logic,
    "ordering": lambda text, answer: _numbers(answer) == sorted(_numbers(text)),
    "parity": _right_parity,
    "pattern": lambda text, answer: int(answer) == 2 * _numbers(text)[-1] - _numbers(text)[-2],
    "units": _right_units,
}


def test_every_subject_has_a_solver_and_questions() -> None:
    tested = {problem.document["subject"] for problem in evaluation_problems("mini_mmlu")}
    assert set(SUBJECTS) == set(SOLVERS) == tested


def test_choices_are_of_one_and_of_several_tokens(tokenizer: Tokenizer) -> None:
    lengths = {
        len(tokenizer.encode(choice).ids)
        for problem in evaluation_problems("mini_mmlu")
        for choice in problem.document["choices"]
    }
    assert 1 in lengths
    assert max(lengths) >= 6


def test_every_instruction_can_be_obeyed_and_disobeyed() -> None:
    tested = evaluation_problems("mini_ifeval")
    assert {problem.document["kind"] for problem in tested} == set(KINDS) == set(CHECKS)
    for problem, other in pairwise(tested):
        kind, arguments = problem.document["kind"], problem.document["arguments"]
        assert obeys(kind, arguments, problem.answer)
        assert obeys(kind, arguments, problem.answer + "\n")
        assert not obeys(kind, arguments, "")
        assert not obeys(kind, arguments, problem.answer + " cat")
        if other.answer != problem.answer:
            assert not obeys(kind, arguments, other.answer)


@pytest.mark.parametrize("task", FILES)
def test_texts_survive_the_tokenizer_without_unknown_tokens(task: str, tokenizer: Tokenizer) -> None:
    for problem in [*some_problems(EVALUATION_FILES[task].problems_of), *evaluation_problems(task)]:
        for text in (problem.prompt, problem.answer, *problem.document.get("choices", ())):
            ids = tokenizer.encode(text).ids
            assert UNKNOWN_ID not in ids
            assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12 + 7 = 19").tokens == ["▁1", "2", "▁+", "▁7", "▁=", "▁1", "9"]


def test_prompt_and_continuation_tokenize_as_the_two_together(tokenizer: Tokenizer) -> None:
    """Scoring encodes a choice behind its prompt; the model was trained on both encoded apart."""
    for problem in evaluation_problems("mini_mmlu")[:100]:
        prompt = prompt_text(problem.prompt)
        for choice in problem.document["choices"]:
            apart = tokenizer.encode(prompt).ids + tokenizer.encode(choice).ids
            assert tokenizer.encode(prompt + choice).ids == apart


def test_the_chat_template_makes_the_prompt_of_the_training() -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    rendered = Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert rendered == prompt_text("What is 2 + 3?") == f"<|user|>What is 2 + 3?{END}<|assistant|>"


@pytest.mark.parametrize("task", FILES)
def test_the_task_file_names_its_data(task: str) -> None:
    described = _described(task)
    assert described["task"] == task
    path = TASKS_FOLDER / described["dataset_kwargs"]["data_files"]["test"]
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    asked = Template(described["doc_to_text"]).render(**first)
    assert asked == evaluation_problems(task)[0].prompt


def _described(task: str) -> dict:
    """A task file over the one that it includes, as the harness reads it."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    described = yaml.load((TASKS_FOLDER / f"{task}.yaml").read_text(encoding="utf-8"), Loader=loader)
    included = described.pop("include", "").removesuffix(".yaml")
    return (_described(included) if included else {}) | described
