"""What would fail after generation, or give a wrong number, is found while a task is loaded."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import hub_access, special_tasks, task_loading
from stepsaver.evaluation.hub_access import dataset_problem
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from tests.evaluation import own_rows
from tests.evaluation.nltk_stand_in import write_punkt_tab


def _problem(name: str, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        load_task(name, TaskOptions(**options))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_wrong_name(data_dir: Path) -> None:
    assert "nearest: gsm8k" in _problem("gms8k", data_dir=data_dir)
    assert "nearest:" in _problem("mmlu_anatomie", data_dir=data_dir)


def test_local_files_that_are_missing(data_dir: Path, tmp_path: Path) -> None:
    assert "does not exist" in _problem("gsm8k", data_dir=tmp_path / "nowhere")
    assert "no documents for 1 of 1 tasks of gsm8k" in _problem("gsm8k", data_dir=tmp_path)
    missing = _problem("mmlu", data_dir=data_dir)
    assert "56 of 57 tasks of mmlu" in missing
    assert missing.endswith("there are: mmlu_anatomy")


def test_few_shot_examples_that_are_missing(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_bytes((data_dir / "gsm8k_test.jsonl").read_bytes())
    assert "no train documents for gsm8k" in _problem("gsm8k", data_dir=tmp_path)
    assert load_task("gsm8k", TaskOptions(data_dir=tmp_path, num_fewshot=0)).accuracy == "exact_match,strict-match"


@pytest.mark.parametrize(
    ("config", "shots", "split"),
    [
        ({"fewshot_split": "dev", "training_split": "train", "validation_split": "val"}, 5, "dev"),
        ({"training_split": "train", "validation_split": "val"}, 5, "train"),
        ({"validation_split": "val", "num_fewshot": 3}, None, "val"),
        ({"fewshot_split": "dev", "num_fewshot": 3}, 0, None),
        ({"fewshot_split": "dev"}, None, None),
        ({"fewshot_split": "dev", "fewshot_config": {"samples": [{"question": "q"}]}}, 5, None),
    ],
)
def test_the_split_that_examples_come_from(config: dict, shots: int | None, split: str | None) -> None:
    assert task_loading._fewshot_split(config, shots) == split


def test_a_tasks_own_split_of_examples_is_missed_though_others_are_there(tmp_path: Path) -> None:
    """MMLU's examples come from `dev`; its validation questions would be other examples."""
    for split in ("test", "validation"):
        (tmp_path / f"anatomy_{split}.csv").write_text("Which?,a,b,c,d,A\nWhere?,a,b,c,d,B\n")
    assert "has no dev documents for mmlu_anatomy" in _problem("mmlu_anatomy", data_dir=tmp_path, num_fewshot=1)
    (tmp_path / "anatomy_dev.csv").write_text("When?,a,b,c,d,C\n")
    task = load_task("mmlu_anatomy", TaskOptions(data_dir=tmp_path, num_fewshot=1)).harness["tasks"]["mmlu_anatomy"]
    assert [row["question"] for row in task.fewshot_docs()] == ["When?"]
    load_task("mmlu_anatomy", TaskOptions(data_dir=tmp_path, num_fewshot=0))


def test_shots_for_a_task_that_has_none_by_definition() -> None:
    assert "0-shot task by definition" in _problem("mini_gsm8k", num_fewshot=5)


def test_shots_are_set(data_dir: Path) -> None:
    for shots in (0, 2):
        task = load_task("gsm8k", TaskOptions(data_dir=data_dir, num_fewshot=shots)).harness["tasks"]["gsm8k"]
        task.set_fewshot_seed(seed=1234)
        task.build_all_requests()
        assert task.instances[0].args[0].count("Question:") == shots + 1


def test_an_undeclared_task_needs_its_metric(data_dir: Path) -> None:
    problem = _problem("gsm8k_cot", data_dir=data_dir)
    assert "no declared accuracy" in problem
    assert "exact_match,strict-match exact_match,flexible-extract" in problem
    loaded = load_task("gsm8k_cot", TaskOptions(data_dir=data_dir, metric="exact_match,flexible-extract"))
    assert loaded.accuracy == "exact_match,flexible-extract"
    assert "has no metric 'acc'" in _problem("gsm8k_cot", data_dir=data_dir, metric="acc")


def test_what_lm_eval_cannot_load_is_one_line(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("its loader\nis broken")

    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", fail)
    problem = _problem("gsm8k", data_dir=data_dir)
    assert problem == "task gsm8k cannot be loaded by lm-eval: RuntimeError: its loader"
    monkeypatch.setattr("lm_eval.tasks._yaml_loader.load_yaml", lambda *_, **__: {}["no such key"])
    assert "cannot be loaded by lm-eval: KeyError" in _problem("gsm8k", data_dir=data_dir)


def test_programs_of_the_model_run_in_a_sandbox_or_not_at_all(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, "UNSAFE_CODE", True, raising=False)
    metric = "exact_match,strict-match"
    assert "no sandbox" in _problem("gsm8k_cot", data_dir=data_dir, metric=metric, confirm_run_unsafe_code=True)


def test_the_index_is_as_it_was_after_loading(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is laid over an index is taken away again, so an index can be shared."""
    kept: list[Any] = []
    build = task_loading._index_of
    monkeypatch.setattr(task_loading, "_index_of", lambda folders: kept.append(build(folders)) or kept[-1])
    load_task("gsm8k_boxed", TaskOptions(data_dir=data_dir))
    assert "gsm8k_boxed" not in kept[0].task_index
    assert all(entry.yaml_path for entry in kept[0].task_index.values() if entry.kind.name == "TASK")


def test_packages_that_are_missing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.minerva_math")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert "lm-eval[math]" in _problem("minerva_math_algebra", data_dir=data_dir)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    assert "ifeval needs langdetect: pip install" in _problem("ifeval", data_dir=data_dir)


# IFEval


def test_ifeval_asks_for_its_data_first(data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert "python -m nltk.downloader punkt_tab" in _problem("ifeval", data_dir=data_dir)


def test_language_detection_is_seeded(data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import langdetect
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(write_punkt_tab(tmp_path))])
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", None)
    load_task("ifeval", TaskOptions(data_dir=data_dir))
    assert langdetect.DetectorFactory.seed is not None
    doubtful = "no per la van de"
    assert len({str(langdetect.detect_langs(doubtful)) for _ in range(5)}) == 1


# GPQA


def test_gpqa_reads_the_same_choices_every_time() -> None:
    """The official shuffle goes on between reading for prompts and reading for scores; ours depends on the question."""
    dataset = Dataset.from_list(own_rows.GPQA)
    first, second = (special_tasks.shuffled_documents(dataset).to_list() for _ in range(2))
    assert first == second
    assert special_tasks.shuffled_documents(dataset.select(range(20, 40))).to_list() == first[20:]
    assert len({row["answer"] for row in first}) == 4


def test_gpqa_gives_the_official_fields() -> None:
    from lm_eval.tasks.gpqa.n_shot import utils as official

    dataset = Dataset.from_list(own_rows.GPQA)
    theirs, ours = official.process_docs(dataset).to_list(), special_tasks.shuffled_documents(dataset).to_list()
    choices = [f"choice{number}" for number in (1, 2, 3, 4)]
    for their, our in zip(theirs, ours, strict=True):
        assert their.keys() <= our.keys()
        assert sorted(their[name] for name in choices) == sorted(our[name] for name in choices)
        assert our[choices["ABCD".index(our["answer"][1])]] == our["Correct Answer"]


def test_the_official_shuffle_still_goes_wrong() -> None:
    """If this fails, lm-eval has repaired it and ours can go."""
    from lm_eval.tasks.gpqa.n_shot import utils as official

    official.rng = random.Random(42)
    dataset = Dataset.from_list(own_rows.GPQA)
    first, second = (official.process_docs(dataset).to_list() for _ in range(2))
    assert [row["answer"] for row in first] != [row["answer"] for row in second]


# The hub


class GatedRepoError(Exception):
    """Stands for the hub's own, which cannot be made without a response."""


class DatasetNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "is_gated", "words"),
    [
        (GatedRepoError("401 hf_secret"), False, ("gated", "HF_TOKEN", "hf auth login", "accept the terms")),
        (DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."), False, ("gated", "accept the terms")),
        (DatasetNotFoundError("no such dataset"), False, ("not accessible", "--data-dir")),
        (DatasetNotFoundError("no such dataset"), True, ("gated", hub_access.GPQA_PAGE)),
        (ConnectionError("hf_secret"), False, ("out of reach", "--data-dir")),
        (ConnectionError("hf_secret"), True, ("gated", "out of reach", hub_access.GPQA_PAGE)),
    ],
)
def test_a_dataset_that_cannot_be_had_is_one_line(error: Exception, is_gated: bool, words: tuple[str, ...]) -> None:
    problem = str(dataset_problem("some_task", error, is_gated=is_gated))
    assert all(word in problem for word in ("some_task", *words))
    assert "\n" not in problem
    assert "hf_secret" not in problem


def test_other_errors_are_not_the_hubs() -> None:
    assert dataset_problem("some_task", ValueError("a bug"), is_gated=True) is None


def test_gpqa_without_access_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    problem = _problem("gpqa_main_n_shot")
    assert "accept the terms at https://huggingface.co/datasets/Idavidrein/gpqa" in problem
    assert "HF_TOKEN" in problem
    assert "hf_secret" not in problem


def test_the_hub_is_offline_only_while_it_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    with hub_access.reachable_hub():
        assert hub.HF_HUB_OFFLINE is True
    assert hub.HF_HUB_OFFLINE is False
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid")
    with hub_access.reachable_hub():
        assert hub.HF_HUB_OFFLINE is False
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_access.is_hub_reachable()
