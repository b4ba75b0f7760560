"""The official tasks on local rows, against what lm-eval itself makes of the same rows.

lm-eval's own way to local rows is a file that includes the official one; that is what ours is compared with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from stepsaver.evaluation.task_loading import TaskOptions, load_task, metric_keys
from stepsaver.evaluation.task_registry import package_folder
from tests.evaluation import own_rows
from tests.evaluation.nltk_stand_in import write_punkt_tab

OFFICIAL = package_folder("lm_eval/tasks")
MMLU_ROWS = [{"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5])} for row in own_rows.MMLU_TEST]
MMLU_DEV_ROWS = [{"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5])} for row in own_rows.MMLU_DEV]
CASES: dict[str, tuple[str, dict[str, list[dict[str, Any]]]]] = {
    "gsm8k": ("gsm8k/gsm8k.yaml", {"test": own_rows.GSM8K_TEST, "train": own_rows.GSM8K_TRAIN}),
    "mmlu_anatomy": ("mmlu/default/mmlu_anatomy.yaml", {"test": MMLU_ROWS, "dev": MMLU_DEV_ROWS}),
    "minerva_math_algebra": ("minerva_math/minerva_math_algebra.yaml", {"test": own_rows.MATH}),
    "ifeval": ("ifeval/ifeval.yaml", {"train": own_rows.IFEVAL}),
    "mmlu_anatomy_generative": ("mmlu/generative/mmlu_anatomy.yaml", {"test": MMLU_ROWS, "dev": MMLU_DEV_ROWS}),
}
SCRIPT = """
from datasets import Dataset

def load(**_):
    return {{split: Dataset.from_list(rows) for split, rows in {rows!r}.items()}}
"""


@pytest.fixture
def nltk_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(write_punkt_tab(tmp_path / "nltk"))])


def _theirs(folder: Path, name: str) -> Any:
    """The task as lm-eval's documentation says to point it at other rows."""
    file, rows = CASES[name]
    (folder / "rows.py").write_text(SCRIPT.format(rows=rows))
    (folder / "task.yaml").write_text(
        f"include: {OFFICIAL / file}\ntask: {name}\ncustom_dataset: !function rows.load\n"
        + ("fewshot_split: null\ntraining_split: null\n" if name.startswith("minerva") else "")
    )
    task = TaskManager(include_defaults=False, include_path=str(folder)).load([name])["tasks"][name]
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    return task


def _requests(task: Any, template: Callable[..., str] | None) -> list[Any]:
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(
        apply_chat_template=template is not None,
        fewshot_as_multiturn=template is not None,
        chat_template=template,
        tokenizer_name="x",
    )
    return [(each.request_type, each.arguments) for each in task.instances]


def _chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return "|".join(f"{each['role']}: {each['content']}" for each in messages) + str(add_generation_prompt)


@pytest.mark.usefixtures("nltk_data")
@pytest.mark.parametrize("template", [None, _chat], ids=["plain", "chat"])
@pytest.mark.parametrize("name", CASES)
def test_prompts_stop_strings_filters_and_metrics_are_lm_evals(
    name: str, template: Callable[..., str] | None, data_dir: Path, tmp_path: Path
) -> None:
    loaded = load_task(name, TaskOptions(data_dir=data_dir))
    ours, theirs = loaded.harness["tasks"][name], _theirs(tmp_path, name)
    assert _requests(ours, template) == _requests(theirs, template)
    assert [each.name for each in ours._filters] == [each.name for each in theirs._filters]
    assert metric_keys(ours) == metric_keys(theirs)
    assert {loaded.accuracy, *loaded.beside} <= set(metric_keys(theirs))
    assert ours.config.num_fewshot == theirs.config.num_fewshot


def test_humaneval_has_the_official_prompts_and_stop_strings(data_dir: Path) -> None:
    """Its official module cannot be imported without a network; its file can be read."""
    loaded = load_task("humaneval", TaskOptions(data_dir=data_dir, confirm_run_unsafe_code=True))
    ours = loaded.harness["tasks"]["humaneval"].config
    theirs = load_yaml(OFFICIAL / "humaneval/humaneval.yaml", resolve_func=False)
    for key in ("doc_to_text", "generation_kwargs", "num_fewshot", "repeats", "unsafe_code"):
        assert getattr(ours, key) == theirs[key], key
    # Which no model sees: the tests, that run apart from the program, after the prompt whose functions they use.
    assert ours.doc_to_target == "{{prompt}}\n" + theirs["doc_to_target"]
    assert [each["name"] for each in ours.filter_list] == [each["name"] for each in theirs["filter_list"]]
    assert loaded.accuracy == f"pass@1,{theirs['filter_list'][0]['name']}"
    requests = _requests(loaded.harness["tasks"]["humaneval"], None)
    assert [arguments[0] for _, arguments in requests] == [row["prompt"] for row in own_rows.HUMANEVAL]


@pytest.mark.parametrize("kind", ["n_shot", "zeroshot", "generative_n_shot", "cot_zeroshot", "cot_n_shot"])
def test_gpqa_has_the_official_prompt(data_dir: Path, kind: str) -> None:
    name = f"gpqa_main_{kind}"
    loaded = load_task(name, TaskOptions(data_dir=data_dir))
    ours = loaded.harness["tasks"][name].config
    theirs = load_yaml(OFFICIAL / f"gpqa/{kind.removesuffix('_n_shot') if 'gen' in kind else kind}/{name}.yaml")
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "output_type", "dataset_name"):
        assert getattr(ours, key) == theirs.get(key, getattr(ours, key)), key
    assert (ours.filter_list or []) == theirs.get("filter_list", [])
    assert {loaded.accuracy, *loaded.beside} == set(metric_keys(loaded.harness["tasks"][name]))
    assert [each["metric"] for each in ours.metric_list] == [each["metric"] for each in theirs["metric_list"]]


def test_the_group_of_minerva_math(data_dir: Path) -> None:
    loaded = load_task("minerva_math", TaskOptions(data_dir=data_dir))
    official = yaml.safe_load((OFFICIAL / "benchmarks/minerva_math.yaml").read_text())
    assert list(loaded.harness["tasks"]) == official["task"]
    assert list(loaded.harness["groups"]) == ["minerva_math"]


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def test_the_boxed_variants(data_dir: Path) -> None:
    gsm8k = load_task("gsm8k_boxed", TaskOptions(data_dir=data_dir)).harness["tasks"]["gsm8k_boxed"]
    (_, (prompt, keywords)), *_ = _requests(gsm8k, None)
    assert prompt == f"Question: {own_rows.GSM8K_TEST[0]['question']}\n{BOXED}"
    assert keywords["until"] == ["Question:", "</s>", "<|im_end|>"]
    math = load_task("minerva_math_boxed", TaskOptions(data_dir=data_dir)).harness
    assert len(math["tasks"]) == 7
    assert list(math["groups"]) == ["minerva_math_boxed"]
    (_, (prompt, _)), *_ = _requests(math["tasks"]["minerva_math_algebra_boxed"], None)
    assert prompt == f"Problem:\n{own_rows.MATH[0]['problem']}\n\n{BOXED}"
    alone = load_task("minerva_math_geometry_boxed", TaskOptions(data_dir=data_dir))
    assert list(alone.harness["tasks"]) == ["minerva_math_geometry_boxed"]


def test_nothing_looked_for_the_network(data_dir: Path, network_attempts: list[object]) -> None:
    for name in (
        "gsm8k",
        "mmlu_anatomy",
        "gpqa_main_n_shot",
        "mini_gsm8k",
        "mini_gsm8k_large",
        "mini_mmlu",
        "mini_ifeval",
    ):
        load_task(name, TaskOptions(data_dir=data_dir))
    assert network_attempts == []


@pytest.mark.usefixtures("nltk_data")
def test_the_real_files(shared: Path) -> None:
    options = TaskOptions(data_dir=shared / "data", confirm_run_unsafe_code=True)
    counts = {"gsm8k": 1319, "mmlu_anatomy": 135, "mmlu_abstract_algebra": 100, "ifeval": 541, "humaneval": 164}
    for name, count in counts.items():
        assert len(load_task(name, options).harness["tasks"][name].eval_docs) == count
