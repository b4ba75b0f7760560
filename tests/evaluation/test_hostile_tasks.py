"""Tasks and data by strangers: what stands in a data folder is data, and a task that cannot be used is one line."""

import random
from pathlib import Path

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import task_loading
from stepsaver.evaluation.adapter import StepsaverLM
from stepsaver.evaluation.evaluate import build_requests
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from stepsaver.evaluation.task_registry import TaskDeclaration
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.scripted_engine import ScriptedEngine

QUESTION = "{{ 1/0 }}{% for i in range(10**9) %}x{% endfor %} {%"
TASK = """task: hostile
dataset_path: nowhere
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: exact_match
"""
WORKS = "it works"
TEXT = '"{{question}}"'
UNREAD = "task hostile stands in no file of hostile_tasks/tasks that lm-eval can read"
CASES = {
    TASK: WORKS,
    "include: hostile.yaml\n" + TASK: UNREAD,
    "include: circle.yaml\n" + TASK: UNREAD,
    "include: nowhere.yaml\n" + TASK: UNREAD,
    "include: /etc/passwd\n" + TASK: UNREAD,
    TASK.replace(TEXT, "!function nothing.text"): "Cannot import module 'nothing'",
    TASK.replace(TEXT, "!function raising.text"): "RuntimeError: two",
    TASK.replace(TEXT, "!function functions.missing"): "missing",
    TASK.replace(TEXT, "!function functions.fails"): "ZeroDivisionError",
    TASK.replace(TEXT, '!!python/object/apply:os.system ["touch ran"]'): UNREAD,
    TASK.replace(TEXT, '"{{ 1/0 }}"'): "ZeroDivisionError",
    TASK.replace(TEXT, '"{{ nothing }}"'): "UndefinedError",
    TASK.replace(TEXT, '"{{ question"'): "TemplateSyntaxError",
    TASK.replace(TEXT, '"{% include question %}"'): "no attribute 'get_source'",
    TASK.replace(TEXT, "\"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}\""): "RecursionError",
    "metadata: &a {x: *a}\n" + TASK: WORKS,
    "unknown_key: 3\n" + TASK: "unexpected keyword argument 'unknown_key'",
    "- hostile\n": UNREAD,
    "task: [hostile\n": UNREAD,
    "\x00\x01": UNREAD,
    "": UNREAD,
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a task, as a plug-in has it, and local documents for it."""
    folder = tmp_path / "hostile_tasks" / "tasks"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "circle.yaml").write_text("include: hostile.yaml\n")
    (folder / "raising.py").write_text("raise RuntimeError('two\\nlines')\n")
    (folder / "functions.py").write_text("def fails(doc):\n    return 1 / 0\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hostile_test.jsonl").write_text('{"question": "%s", "answer": "7"}\n' % QUESTION)  # noqa: UP031
    declared = TaskDeclaration("hostile", "hostile_tasks/tasks", "generation", "exact_match,none")
    monkeypatch.setattr(task_loading, "find_declaration", lambda name: declared if name == "hostile" else None)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return folder


def _outcome(folder: Path, tokenizer: TextTokenizer) -> str:
    try:
        task = load_task("hostile", TaskOptions(data_dir=folder.parents[1] / "data"))
        lm = StepsaverLM(ScriptedEngine(tokenizer), tokenizer)  # type: ignore[arg-type]
        (request,) = build_requests(lm, task)["hostile"]
    except UsageError as error:
        return str(error)
    return WORKS if QUESTION in request.args[0] else "another prompt"  # a document's text is no template


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_hostile_task(number: int, package: Path, byte_tokenizer: TextTokenizer) -> None:
    content, expected = list(CASES.items())[number]
    (package / "hostile.yaml").write_text(content)
    said = _outcome(package, byte_tokenizer)
    assert expected in said
    assert "\n" not in said
    assert not list(Path.cwd().glob("ran"))


@pytest.mark.long
def test_spoiled_task_files(package: Path, byte_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 task files with a few characters changed: one line, or a task whose prompts are what its file says now."""
    monkeypatch.setattr("evaluate.load", _no_such_metric)  # it tries the hub for a quarter of a minute
    draw = random.Random(0)
    outcomes = []
    for _ in range(500):
        text = list(draw.choice([TASK, draw.choice(list(CASES))]))
        for _ in range(draw.choice([1, 1, 2, 5])):
            if text:
                text[draw.randrange(len(text))] = draw.choice([*"{}%[]!&*:-\"' \n\t~|>", "", "x", "\x00"])
        (package / "hostile.yaml").write_text("".join(text))
        outcomes.append(_outcome(package, byte_tokenizer))
    assert not [each for each in outcomes if "\n" in each]
    assert outcomes.count(WORKS) >= 5


def _no_such_metric(*_: object, **__: object) -> None:
    raise FileNotFoundError("no such metric")


def test_what_stands_beside_the_data_is_not_run(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data folder holds documents. Task files and modules in it are not read, whatever their names."""
    monkeypatch.chdir(tmp_path)
    for path in data_dir.glob("gsm8k*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("gsm8k.yaml", "_default_template_yaml", "gsm8k_test.yaml"):
        (tmp_path / name).write_text("task: gsm8k\ndoc_to_text: !function evil.text\ninclude: evil.yaml\n")
    for name in ("evil.py", "utils.py", "__init__.py", "gsm8k.py", "datasets.py"):
        (tmp_path / name).write_text("open('ran', 'w')\n")
    task = load_task("gsm8k", TaskOptions(data_dir=tmp_path)).harness["tasks"]["gsm8k"]
    assert task.config.doc_to_text == "Question: {{question}}\nAnswer:"
    assert not (tmp_path / "ran").exists()
