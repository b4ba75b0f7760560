"""The declared tasks: every file is read, and what it says is true of lm-eval's own definition."""

from pathlib import Path

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import task_registry
from stepsaver.evaluation.task_registry import find_declaration, harness_names, task_declarations, unknown_task


def test_the_tasks_of_the_experiments_are_declared() -> None:
    wanted = {"gsm8k", "minerva_math", "ifeval", "humaneval", "mmlu", "gpqa_main_n_shot"}
    variants = {"gsm8k_boxed", "minerva_math_boxed", "mmlu_generative", "mmlu_generative_boxed"}
    embedded = {"mini_gsm8k", "mini_gsm8k_large", "mini_gsm8k_final", "mini_mmlu", "mini_ifeval"}
    assert wanted | variants | embedded <= task_declarations().keys()


def test_the_accuracy_is_the_proposals() -> None:
    known = task_declarations()
    assert known["gsm8k"].accuracy == "exact_match,strict-match"
    assert known["gsm8k"].beside == ("exact_match,flexible-extract",)
    assert known["mmlu"].accuracy == "acc,none"


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("mmlu_anatomy", "mmlu"),
        ("mmlu_stem", "mmlu"),
        ("minerva_math_algebra", "minerva_math"),
        ("minerva_math_algebra_boxed", "minerva_math_boxed"),
        ("gpqa_diamond_n_shot", "gpqa_main_n_shot"),
        ("humaneval_instruct", "humaneval"),
        ("mmlu_anatomy_generative", "mmlu_generative"),
        ("mmlu_stem_generative", "mmlu_generative"),
        ("mmlu_anatomy_generative_boxed", "mmlu_generative_boxed"),
        ("gpqa_diamond_generative_n_shot", "gpqa_main_generative_n_shot"),
        ("gpqa_extended_cot_zeroshot", "gpqa_main_cot_zeroshot"),
    ],
)
def test_further_names_of_a_declaration(name: str, declared: str) -> None:
    found = find_declaration(name)
    assert found is not None
    assert found.name == declared


def test_other_names_have_no_declaration() -> None:
    assert find_declaration("hellaswag") is None
    assert find_declaration("humaneval_64") is None  # another metric


def test_every_declaration_says_what_it_is() -> None:
    assert all(each.summary and each.path in ("generation", "scoring") for each in task_declarations().values())


def test_the_scan_knows_the_harnesss_names() -> None:
    names = harness_names()
    assert {"gsm8k", "mmlu", "minerva_math", "hellaswag", "ifeval", "humaneval", "ai2_arc"} <= names.keys()
    assert names["hellaswag"] is not None
    assert names["mmlu"] is None  # a group


@pytest.mark.parametrize(
    ("typed", "meant"), [("gms8k", "gsm8k"), ("mmul", "mmlu"), ("hellaswog", "hellaswag"), ("humanevel", "humaneval")]
)
def test_a_wrong_name_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    assert meant in str(unknown_task(typed)).rpartition("nearest: ")[2].split(", ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("source: x\npath: generation\naccuracy: a\nacuracy: b\n", "unknown keys acuracy"),
        ("source: x\n", "missing keys accuracy, path"),
    ],
)
def test_a_wrong_declaration_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UsageError, match=problem):
        task_registry._read(tmp_path / "x.yaml")
