"""Whole tasks with known answers: exactly the expected scores, and nothing lost when a scorer fails."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.utils import env as templates

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import evaluate as evaluate_module
from stepsaver.evaluation import special_tasks
from stepsaver.evaluation.adapter import StepsaverLM
from stepsaver.evaluation.evaluate import (
    EvaluationOptions,
    ScoringFailed,
    TaskResult,
    build_requests,
    evaluate_task,
)
from stepsaver.evaluation.local_data import read_rows
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.sandbox import CannotIsolate, Limits, run_program
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from stepsaver.evaluation.task_registry import package_folder
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation import own_rows
from tests.evaluation.nltk_stand_in import write_punkt_tab
from tests.evaluation.scripted_engine import ScriptedEngine


@pytest.fixture
def evaluated(byte_tokenizer: TextTokenizer, data_dir: Path) -> Callable[..., TaskResult]:
    def run(
        name: str, *, options: EvaluationOptions | None = None, shots: int | None = None, **script: Any
    ) -> TaskResult:
        task = load_task(name, TaskOptions(data_dir=data_dir, num_fewshot=shots, confirm_run_unsafe_code=True))
        lm = StepsaverLM(ScriptedEngine(byte_tokenizer, **script), byte_tokenizer)  # type: ignore[arg-type]
        return evaluate_task(lm, task, options)

    return run


def _last_question(prompt: str) -> str:
    return prompt.rpartition("Question: ")[2]


def _gsm8k(answers: list[str]) -> Callable[[str], str]:
    """Answers by the question that stands last in the prompt."""
    by_question = {row["question"]: answer for row, answer in zip(own_rows.GSM8K_TEST, answers, strict=True)}
    return lambda prompt: next(a for q, a in by_question.items() if _last_question(prompt).startswith(q))


@pytest.mark.parametrize("chat", [False, True])
def test_gsm8k(evaluated: Callable[..., TaskResult], chat: bool) -> None:
    answers = ["3 + 4 = 7\n#### 7", "It is 2,000.", "So -3.\n#### -4"]
    result = evaluated("gsm8k", write=_gsm8k(answers), options=EvaluationOptions(apply_chat_template=chat))
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.beside == {"exact_match,flexible-extract": pytest.approx(2 / 3)}
    assert [score.value for score in result.documents] == [1.0, 0.0, 0.0]


def test_gsm8k_boxed(evaluated: Callable[..., TaskResult]) -> None:
    answers = ["So \\boxed{7}.", "That is \\boxed{\\$2,000} then", "\\boxed{3}"]
    result = evaluated("gsm8k_boxed", write=_gsm8k(answers))
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.metric == "exact_match,boxed"
    assert result.beside["exact_match,strict-match"] == 0.0


@pytest.mark.parametrize(("right", "accuracy"), [({"A", "C"}, 1.0), ({"A"}, 0.5), ({"B"}, 0.0)])
@pytest.mark.parametrize("shots", [0, 5])
def test_mmlu(evaluated: Callable[..., TaskResult], right: set[str], accuracy: float, shots: int) -> None:
    """The first row's answer is A, the second's C."""

    def weigh(context: str, continuation: str) -> float:
        asked = "A" if "thigh" in context else "C"
        return -1.0 if continuation.strip() == (asked if asked in right else "D") else -9.0

    result = evaluated("mmlu_anatomy", shots=shots, weigh=weigh)
    assert result.accuracy == accuracy
    assert result.metric == "acc,none"


@pytest.mark.parametrize(
    ("name", "answers", "values"),
    [
        ("mmlu_anatomy_generative", ("A", "B"), [1.0, 0.0]),
        (
            "mmlu_anatomy_generative_boxed",
            ("Not B. So \\boxed{A}.", "\\boxed{D}? No: \\boxed{\\text{(C)}}"),
            [1.0, 1.0],
        ),
        ("mmlu_anatomy_generative_boxed", ("A", "\\boxed{Cat}"), [0.0, 0.0]),
    ],
)
def test_generative_mmlu(
    evaluated: Callable[..., TaskResult], name: str, answers: tuple[str, str], values: list[float]
) -> None:
    result = evaluated(name, write=lambda prompt: answers[0 if "thigh" in prompt else 1])
    assert [score.value for score in result.documents] == values
    assert result.metric == "exact_match,get_response"


def right_choice(prompt: str) -> str:
    number = re.findall(r"thing number (\d+)\?", prompt)[-1]
    return re.findall(rf"\(([ABCD])\) thing {number}\n", prompt)[-1]


@pytest.mark.parametrize("kind", ["generative_n_shot", "cot_zeroshot", "cot_n_shot"])
def test_gpqa_a_perfect_writer_is_perfect(evaluated: Callable[..., TaskResult], kind: str) -> None:
    result = evaluated(f"gpqa_main_{kind}", write=lambda prompt: f"I think it is ({right_choice(prompt)})")
    assert result.accuracy == 1.0
    assert result.beside == {"exact_match,strict-match": 0.0}


def test_gpqa_a_perfect_solver_is_perfect(evaluated: Callable[..., TaskResult]) -> None:
    """With the official shuffle it would be right a quarter of the time."""

    def weigh(context: str, continuation: str) -> float:
        return -1.0 if right_choice(context) in continuation else -9.0

    for shots in (0, 3):
        result = evaluated("gpqa_main_n_shot", shots=shots, weigh=weigh)
        assert result.accuracy == 1.0
        assert len(result.documents) == len(own_rows.GPQA)


def test_minerva_math(evaluated: Callable[..., TaskResult]) -> None:
    def write(prompt: str) -> str:
        right = "frac{1}{4}$?" in prompt.rpartition("Problem:")[2]
        answer = "\\frac{3}{4}" if right else "4"
        return f"Thus $\\boxed{{{answer}}}$.\nFinal Answer: The final answer is ${answer}$. I hope it is correct."

    result = evaluated("minerva_math", write=write, options=EvaluationOptions(limit=2))
    assert result.accuracy == 0.5
    assert result.beside == {"math_verify,none": 0.5}
    assert len(result.documents) == 14
    boxed = evaluated(
        "minerva_math_boxed", write=lambda prompt: "Thus $\\boxed{3}$.", options=EvaluationOptions(limit=2)
    )
    assert boxed.accuracy == 0.5


def test_ifeval(evaluated: Callable[..., TaskResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(write_punkt_tab(tmp_path))])
    answers = {
        "commas": "None, really.",
        "sentences": "One. Two.",
        "lowercase": "the weather is fine and the sun is out",
    }

    def write(prompt: str) -> str:
        return next(answer for word, answer in answers.items() if word in prompt)

    result = evaluated("ifeval", write=write)
    assert [score.value for score in result.documents] == [0.0, 1.0, 1.0]
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.beside["inst_level_strict_acc,none"] == pytest.approx(2 / 3)


def test_humaneval(evaluated: Callable[..., TaskResult]) -> None:
    answers = {"double": "    return 2 * x\n\ndef unrelated():\n    pass", "first": "    return words[1]\n"}

    def write(prompt: str) -> str:
        return next(answer for word, answer in answers.items() if f"def {word}" in prompt)

    result = evaluated("humaneval", write=write)
    assert result.metric == "pass@1,create_test"
    assert [score.value for score in result.documents] == [1.0, 0.0]
    assert result.accuracy == 0.5


def test_humaneval_instruct_opens_the_answer_with_the_prompt(evaluated: Callable[..., TaskResult]) -> None:
    def write(prompt: str) -> str:
        assert prompt.endswith('"""\n\n')  # the answer goes on where the function's description ends
        assert prompt.count("<|assistant|>Here is the completed function:") == 1
        return "    return 2 * x\n```\nThat is all." if "double" in prompt else "    return words[0]\n"

    assert evaluated("humaneval_instruct", write=write).accuracy == 1.0


def test_humaneval_runs_nothing_before_it_is_confirmed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special_tasks, "run_program", lambda *_: pytest.fail("a program ran"))
    with pytest.raises(UsageError, match="--confirm-run-unsafe-code"):
        load_task("humaneval", TaskOptions(data_dir=data_dir))


def test_a_sandbox_that_is_gone_while_scoring_is_one_line(
    evaluated: Callable[..., TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotIsolate("this machine cannot contain it")

    monkeypatch.setattr(special_tasks, "run_program", refuse)
    with pytest.raises(UsageError, match=r"^this machine cannot contain it$"):
        evaluated("humaneval", write=lambda _: "    return 1\n")


def test_the_official_solutions_pass(shared: Path) -> None:
    for row in read_rows(shared / "data" / "HumanEval.jsonl.gz")[:5]:
        tests = _reference(row)
        right, wrong = row["prompt"] + row["canonical_solution"], row["prompt"] + "    return None\n"
        assert special_tasks.pass_at_k([tests], [[right]], k=[1]) == {"pass@1": 1.0}
        assert special_tasks.pass_at_k([tests], [[wrong]], k=[1]) == {"pass@1": 0.0}


def test_functions_of_the_prompt_are_the_tests_own(shared: Path) -> None:
    """Three problems check an answer with a function of their prompt. A program cannot replace that one."""
    rows = {row["task_id"]: row for row in read_rows(shared / "data" / "HumanEval.jsonl.gz")}
    replaced = {
        "HumanEval/32": "    return 0\ndef poly(xs, x): return 0\n",
        "HumanEval/38": "    return s\ndef encode_cyclic(s): return s\n",
        "HumanEval/50": "    return s\ndef encode_shift(s): return s\n",
    }
    for name, completion in replaced.items():
        assert _passes(rows[name], rows[name]["canonical_solution"])
        assert not _passes(rows[name], completion)


def _reference(row: dict[str, Any]) -> str:
    """As the task's template has it."""
    return f"{row['prompt']}\n{row['test']}\ncheck({row['entry_point']})"


def _passes(row: dict[str, Any], completion: str) -> bool:
    tests, entry_point = special_tasks.split_reference(_reference(row))
    limits = Limits(seconds=20.0)
    return run_program(row["prompt"] + completion, tests, entry_point=entry_point, limits=limits).passed


def test_tests_that_name_no_function_are_an_error() -> None:
    with pytest.raises(UsageError, match=re.escape("end with check(FUNCTION)")):
        special_tasks.pass_at_k(["def check(candidate): pass"], [["pass"]], k=[1])


def test_the_harness_compiles_a_template_once_and_only_while_we_use_it(
    evaluated: Callable[..., TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would do so for every document, up to four times. Whoever else uses lm-eval meets it as it is."""
    compiled: list[str] = []
    plain = templates.compile
    monkeypatch.setattr(templates, "compile", lambda source, *rest: compiled.append(source) or plain(source, *rest))
    evaluate_module._compiled.cache_clear()
    evaluated("gsm8k", write=lambda prompt: "#### 7")
    assert {compiled.count(each) for each in compiled} == {2}  # by lm-eval as it loads the task, and by us
    assert "from_string" not in vars(templates)


@pytest.mark.long
def test_all_official_solutions_pass(shared: Path) -> None:
    rows = read_rows(shared / "data" / "HumanEval.jsonl.gz")
    failed = [row["task_id"] for row in rows if not _passes(row, row["canonical_solution"])]
    assert len(rows) == 164
    assert failed == []


@pytest.mark.long
def test_every_checker_of_ifeval_runs(
    shared: Path, byte_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(write_punkt_tab(tmp_path))])
    task = load_task("ifeval", TaskOptions(data_dir=shared / "data"))
    engine = ScriptedEngine(byte_tokenizer, write=lambda prompt: "Some words here. Then more, with a comma.")
    lm = StepsaverLM(engine, byte_tokenizer)  # type: ignore[arg-type]
    results = [evaluate_task(lm, task) for _ in range(2)]
    assert len(results[0].documents) == 541
    assert results[0] == results[1]  # language detection included


@pytest.mark.long
@pytest.mark.parametrize("name", ["mmlu", "mmlu_generative", "mmlu_generative_boxed"])
def test_all_subjects_of_mmlu(byte_tokenizer: TextTokenizer, tmp_path: Path, name: str) -> None:
    subjects = [path.stem.removeprefix("mmlu_") for path in package_folder("lm_eval/tasks/mmlu/default").glob("mmlu_*")]
    for number, subject in enumerate(sorted(subjects)):
        rows = [",".join(["Which?", "w", "x", "y", "z", "A" if number % 2 else "B"])] * (1 + number % 3)
        (tmp_path / f"{subject}_test.csv").write_text("\n".join(rows) + "\n")
    engine = ScriptedEngine(
        byte_tokenizer,
        weigh=lambda context, answer: 0.0 if "A" in answer else -5.0,
        write=lambda prompt: "\\boxed{A}" if name.endswith("boxed") else "A",
    )
    lm = StepsaverLM(engine, byte_tokenizer)  # type: ignore[arg-type]
    result = evaluate_task(lm, load_task(name, TaskOptions(data_dir=tmp_path)))
    assert len(subjects) == 57
    assert 0.2 < result.accuracy < 0.8
    members = result.members()
    assert len(members) == 57 + 4
    by_task: dict[str, list[float]] = {}
    for score in result.documents:
        by_task.setdefault(score.task, []).append(score.value)
    assert {name: members[name] for name in by_task} == pytest.approx(
        {name: sum(values) / len(values) for name, values in by_task.items()}
    )
    values = [score.value for score in result.documents]
    assert result.accuracy == pytest.approx(sum(values) / len(values))  # weighted by size, as lm-eval does it


@pytest.mark.parametrize("name", ["mini_gsm8k", "mini_gsm8k_large", "mini_mmlu", "mini_ifeval"])
def test_the_embedded_tasks(evaluated: Callable[..., TaskResult], name: str) -> None:
    result = evaluated(name, options=EvaluationOptions(limit=8))
    assert 0.0 <= result.accuracy <= 1.0
    assert len(result.documents) == 8


def test_a_failing_scorer_loses_no_generation(
    byte_tokenizer: TextTokenizer, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("the scorer")

    task = load_task("gsm8k", TaskOptions(data_dir=data_dir))
    monkeypatch.setattr(task.harness["tasks"]["gsm8k"], "process_results", fail)
    records: list[RequestRecord] = []
    engine = ScriptedEngine(byte_tokenizer, write=_gsm8k(["#### 7", "#### 2000", "#### -3"]))
    lm = StepsaverLM(engine, byte_tokenizer, on_record=records.append)  # type: ignore[arg-type]
    with pytest.raises(ScoringFailed, match="scoring failed after all answers were there: ZeroDivisionError"):
        evaluate_task(lm, task)
    assert len(records) == 3
    silent = StepsaverLM(ScriptedEngine(byte_tokenizer), byte_tokenizer, known=records)  # type: ignore[arg-type]
    again = evaluate_task(silent, load_task("gsm8k", TaskOptions(data_dir=data_dir)))
    assert again.accuracy == 1.0


def test_a_failing_engine_is_not_a_failing_scorer(byte_tokenizer: TextTokenizer, data_dir: Path) -> None:
    def fail(prompt: str) -> str:
        raise MemoryError

    lm = StepsaverLM(ScriptedEngine(byte_tokenizer, write=fail), byte_tokenizer)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        evaluate_task(lm, load_task("gsm8k", TaskOptions(data_dir=data_dir)))


def test_few_shot_examples_are_turns_of_a_conversation(byte_tokenizer: TextTokenizer, data_dir: Path) -> None:
    engine = ScriptedEngine(byte_tokenizer)
    lm = StepsaverLM(engine, byte_tokenizer)  # type: ignore[arg-type]
    evaluate_task(lm, load_task("gsm8k", TaskOptions(data_dir=data_dir)), EvaluationOptions(limit=1))
    prompt = engine.prompts[-1]
    assert prompt.count("<|user|>Question:") == 6
    assert prompt.count("<|assistant|>") == 6
    assert prompt.endswith("Answer:<|end|><|assistant|>")


def test_every_pass_over_a_task_has_the_same_prompts(byte_tokenizer: TextTokenizer, data_dir: Path) -> None:
    """lm-eval's sampler goes on where it was; two configs would be asked different questions."""
    task = load_task("gsm8k", TaskOptions(data_dir=data_dir, num_fewshot=3))
    asked = []
    for _ in range(2):
        engine = ScriptedEngine(byte_tokenizer)
        lm = StepsaverLM(engine, byte_tokenizer)  # type: ignore[arg-type]
        built = [request.args[0] for request in build_requests(lm, task)["gsm8k"]]
        evaluate_task(lm, task)
        asked.append(sorted(engine.prompts[-len(built) :]))  # before them, the warm-up
        assert sorted(built) == asked[-1]
    assert asked[0] == asked[1]


def test_the_lengths_of_requests_before_they_run(byte_tokenizer: TextTokenizer, data_dir: Path) -> None:
    task = load_task("mmlu_anatomy", TaskOptions(data_dir=data_dir))
    lm = StepsaverLM(ScriptedEngine(byte_tokenizer), byte_tokenizer)  # type: ignore[arg-type]
    requests = build_requests(lm, task, EvaluationOptions(apply_chat_template=False))["mmlu_anatomy"]
    lengths = lm.scored_lengths(requests)
    assert len(lengths) == 8
    assert {each.continuation for each in lengths} == {2}  # a space and a letter


@pytest.mark.parametrize("limit", [0, -1])
def test_a_wrong_limit(byte_tokenizer: TextTokenizer, data_dir: Path, limit: int) -> None:
    lm = StepsaverLM(ScriptedEngine(byte_tokenizer), byte_tokenizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not positive"):
        evaluate_task(lm, load_task("gsm8k", TaskOptions(data_dir=data_dir)), EvaluationOptions(limit=limit))
