"""Texts, chat prompts and special tokens, with the byte tokenizer, the embedded one and the real one."""

from pathlib import Path

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.embedded.tokenizer import write_tokenizer
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.byte_tokenizer import END_ID, TEMPLATE, write_byte_tokenizer


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
    theirs = byte_tokenizer._tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
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


def test_the_real_tokenizer(shared: Path) -> None:
    """Vocabulary and merges without a `tokenizer.json`."""
    tokenizer = TextTokenizer(shared / "fast_dllm_v2_7b")
    assert tokenizer.added_token("|<MASK>|") == 151665
    assert tokenizer.encode("Hello<|im_end|>") == [9707, 151645]
    assert tokenizer.decode([9707, 151645]) == "Hello"
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
