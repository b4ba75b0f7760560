"""Texts, chat prompts and special tokens, with the byte tokenizer, the embedded one and the real one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.byte_tokenizer import END_ID, TEMPLATE, VOCABULARY, write_byte_tokenizer
from training.problems.tokenizer import write_tokenizer


@pytest.mark.parametrize("text", ["", "plain", "two\nlines \n", "naïve – 日本語 🙂", " leading", "<|end|>"])
def test_text_survives(byte_tokenizer: TextTokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text), keep_special=True) == text


def test_special_tokens_are_hidden_unless_asked_for(byte_tokenizer: TextTokenizer) -> None:
    ids = byte_tokenizer.encode("a<|end|>b")
    assert ids[1] == END_ID == byte_tokenizer.added_token("<|end|>")
    assert byte_tokenizer.decode(ids) == "ab"
    assert byte_tokenizer.added_token("a") is None


def test_chat_prompt_opens_an_answer_or_goes_on_with_one(byte_tokenizer: TextTokenizer) -> None:
    question = {"role": "user", "content": "Q"}
    assert byte_tokenizer.chat_prompt([question]) == "<|user|>Q<|end|><|assistant|>"
    begun = [question, {"role": "assistant", "content": "A:"}]
    assert byte_tokenizer.chat_prompt(begun, opens_answer=False) == "<|user|>Q<|end|><|assistant|>A:"


@pytest.mark.parametrize("begun", ["A:", "The answer is ", "Q"])
def test_an_open_answer_is_transformers_own(byte_tokenizer: TextTokenizer, begun: str) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": begun}]
    transformers = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(byte_tokenizer.folder))
    theirs = transformers.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert byte_tokenizer.chat_prompt(messages, opens_answer=False) == theirs


def test_without_a_chat_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_byte_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat_prompt([{"role": "user", "content": "Q"}])


def test_fingerprint_changes_with_the_template(tmp_path: Path) -> None:
    names = {
        TextTokenizer(write_byte_tokenizer(tmp_path / "same", chat_template=each)).fingerprint
        for each in (None, TEMPLATE)
    }
    assert len(names) == 2


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usable tokenizer") as raised:
        TextTokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_embedded_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    text = "Rosa has 42 books. How many?\n#### 42"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_prompt([{"role": "user", "content": "How"}]) == "<|user|>How<|end|><|assistant|>"


TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "|<MASK>|", "<tool_call>", "<|end|>", "don't", " 12", "\n\n", "e\u0301"]
    )
).map("".join)


@pytest.fixture(scope="module", params=["real", "embedded", "byte"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, Any]:
    """Our tokenizer of a folder, and transformers' own."""
    transformers = pytest.importorskip("transformers")
    if request.param == "real":
        folder = request.getfixturevalue("shared") / "fast_dllm_v2_7b"
    else:
        folder = tmp_path_factory.mktemp(request.param)
        (write_tokenizer if request.param == "embedded" else write_byte_tokenizer)(folder)
    return TextTokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_ids_and_texts_are_those_of_transformers(both: tuple[TextTokenizer, Any], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    for keep in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=not keep, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, keep_special=keep) == expected


def test_special_tokens_and_prompts_are_those_of_transformers(both: tuple[TextTokenizer, Any]) -> None:
    ours, theirs = both
    assert ours._added == theirs.get_added_vocab()
    for index in ours._added.values():
        assert ours.decode([index]) == theirs.decode([index], skip_special_tokens=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi\n"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat_prompt(messages) == expected


def test_one_of_several_templates_is_the_default(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path, chat_template=None)
    path = folder / "tokenizer_config.json"
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": several}))
    assert TextTokenizer(folder).chat_template == "D"


def test_special_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    """They get the next ids, are matched whole, and are left out of texts."""
    folder = write_byte_tokenizer(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": {"content": "<pad>"}}))
    tokenizer = TextTokenizer(folder)
    assert tokenizer.encode("a<pad>")[1:] == [VOCABULARY]
    assert tokenizer.decode([VOCABULARY]) == ""


def test_an_added_token_with_an_impossible_id_is_refused(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": VOCABULARY + 7}))
    with pytest.raises(UsageError, match=r"'<new>' has the id 268, and it would get 261"):
        TextTokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_files_that_need_transformers_name_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="pip install transformers"):
        TextTokenizer(tmp_path)


def test_the_real_tokenizer(shared: Path) -> None:
    """Vocabulary and merges without a `tokenizer.json`."""
    tokenizer = TextTokenizer(shared / "fast_dllm_v2_7b")
    assert tokenizer.added_token("|<MASK>|") == 151665
    assert tokenizer.encode("Hello<|im_end|>") == [9707, 151645]
    assert tokenizer.decode([9707, 151645]) == "Hello"
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
