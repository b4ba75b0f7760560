"""What is scored of a context and a continuation: the answer, never the white space that a chat template ends with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance

from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import random_model
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.encoding import encode_pair
from stepsaver.evaluation.evaluate import build_requests
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.task_loading import TaskOptions, load_task
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.conftest import sharpened, tiny_config
from tests.evaluation.byte_tokenizer import MASK_ID, TEMPLATE, write_byte_tokenizer

OPENING = "<|assistant|>\n\n"
QUESTION = "Which?\nA. one\nB. two\nAnswer:"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Bytes, and a template that ends in white space as the 7B's does."""
    template = TEMPLATE.replace("<|assistant|>", "{{ '" + OPENING.replace("\n", "\\n") + "' }}")
    return TextTokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=template))


@pytest.fixture(scope="module")
def real_tokenizer(shared: Path) -> TextTokenizer:
    return TextTokenizer(shared / "fast_dllm_v2_7b")


def chat(tokenizer: TextTokenizer, question: str = QUESTION) -> str:
    return tokenizer.chat_prompt([{"role": "user", "content": question}])


@settings(deadline=None)  # the first call reads the tokenizer
@given(st.text(max_size=30), st.text(max_size=10))
def test_what_a_template_wrote_is_context_and_the_rest_is_scored(
    tokenizer: TextTokenizer, question: str, answer: str
) -> None:
    prompt = chat(tokenizer, question)
    context, scored = encode_pair(tokenizer, prompt, answer)
    assert list(context) == tokenizer.encode(prompt)
    assert list(scored) == tokenizer.encode(answer)


def test_what_the_task_wrote_is_moved_as_the_harness_does(tokenizer: TextTokenizer) -> None:
    begun = tokenizer.chat_prompt(
        [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "It is "}], opens_answer=False
    )
    assert begun.endswith("It is ")
    assert tokenizer.decode(encode_pair(tokenizer, begun, "A").continuation) == " A"
    assert tokenizer.decode(encode_pair(tokenizer, "no chat\n\n", "A").continuation) == "\n\nA"


@pytest.mark.parametrize("template", [None, "{{ messages[-1]['content'] }}\n"])
def test_without_an_opening_all_white_space_is_the_tasks(tmp_path: Path, template: str | None) -> None:
    """A template that only adds white space cannot be told from a task that does."""
    tokenizer = TextTokenizer(write_byte_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.answer_opening.strip() == ""
    assert tokenizer.decode(encode_pair(tokenizer, "Answer:\n", "A").continuation) == "\nA"


@pytest.mark.parametrize(("answer", "tokens"), [("A", ["A"]), (" A", [" A"]), ("\n A", ["\n", " A"])])
def test_the_real_template_leaves_the_answer(real_tokenizer: TextTokenizer, answer: str, tokens: list[str]) -> None:
    prompt = chat(real_tokenizer)
    context, scored = encode_pair(real_tokenizer, prompt, answer)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert list(context) == real_tokenizer.encode(prompt)
    assert [real_tokenizer.decode([token]) for token in scored] == tokens


def scored_choices(tokenizer: TextTokenizer, estimator: Any, **shape: int) -> tuple[list[float], list[str]]:
    """The log-likelihoods of four choices by an engine, and the texts that were scored."""
    records: list[RequestRecord] = []
    model = sharpened(random_model(tiny_config(layers=1, hidden=16, **shape), dtype=torch.float64, seed=2))
    settings = AdapterSettings(estimator=estimator, show_progress=False)
    lm = StepsaverLM(Engine(model), tokenizer, settings=settings, on_record=records.append)
    requests = [
        Instance("loglikelihood", {}, (chat(tokenizer), letter), place, metadata=("task", 0, 1))
        for place, letter in enumerate("ABCD")
    ]
    values = [value for value, _ in lm.loglikelihood(requests)]
    in_order = sorted(records, key=lambda record: record.key)
    return values, [tokenizer.decode(record.ids) for record in in_order]


@pytest.mark.parametrize("estimator", ["trajectory", "reference"])
def test_the_letter_is_scored_by_either_estimator(tokenizer: TextTokenizer, estimator: str) -> None:
    """The reference estimator masks the first target token: were that a newline, all choices would be equal."""
    values, texts = scored_choices(tokenizer, estimator, vocab=261, mask_id=MASK_ID)
    assert texts == list("ABCD")
    assert len(set(values)) == 4


@pytest.mark.parametrize("estimator", ["trajectory", "reference"])
def test_the_letter_is_scored_with_the_real_tokenizer(real_tokenizer: TextTokenizer, estimator: str) -> None:
    values, texts = scored_choices(real_tokenizer, estimator, vocab=151936, mask_id=151665)
    assert texts == list("ABCD")
    assert len(set(values)) == 4


@pytest.mark.parametrize("fixture", ["tokenizer", "real_tokenizer"])
def test_mmlu_scores_one_token(fixture: str, data_dir: Path, request: pytest.FixtureRequest) -> None:
    """The official task with a chat template: its requests have one step, so that no rule can act on them."""
    found: TextTokenizer = request.getfixturevalue(fixture)
    model = random_model(tiny_config(layers=1, vocab=61), dtype=torch.float64)
    lm = StepsaverLM(Engine(model), found)
    (requests,) = build_requests(lm, load_task("mmlu_anatomy", TaskOptions(data_dir=data_dir))).values()
    assert {each.continuation for each in lm.scored_lengths(requests)} == {1}
    assert {found.decode(encode_pair(found, *each.args).continuation) for each in requests} == set("ABCD")
