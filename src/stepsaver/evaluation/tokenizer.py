"""Text to ids and back, and chat prompts."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal, TypedDict

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.chat_template import ChatTemplate
from stepsaver.evaluation.tokenizer_files import read_tokenizer

_ANY_QUESTION = "a question that no template contains"


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class TextTokenizer:
    """The tokenizer of a model folder. No code of a checkpoint is run, and encoding adds no tokens by itself.

    A chat template writes the special tokens it needs into the text, and the harness's own adapter adds none either.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _told_apart(folder):
            self._tokenizer, self._special_texts, self.chat_template = read_tokenizer(folder)
            added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: index for index, token in added.items()}

    def encode(self, text: str) -> list[int]:
        with _told_apart(self.folder):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        with _told_apart(self.folder):
            return self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special)

    def token_text(self, token: int) -> str:
        """What a token adds to a text. Decoded as the second token: some decoders drop the space before the first."""
        alone, twice = self.decode([token], keep_special=True), self.decode([token, token], keep_special=True)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def chat_prompt(self, messages: Sequence[Message], *, opens_answer: bool = True) -> str:
        """The prompt for a conversation.

        With `opens_answer` it ends where the answer begins. Without, the last message is the start of an answer and is
        left open.
        """
        if not self.has_chat_template:
            raise UsageError(f"the tokenizer in {self.folder} has no chat template")
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        text = self._renderer.render(plain, opens_answer=opens_answer)
        return text if opens_answer else _up_to(text, messages[-1]["content"])

    @cached_property
    def _renderer(self) -> ChatTemplate:
        return ChatTemplate(self.chat_template or "", self._special_texts)

    @cached_property
    def answer_opening(self) -> str:
        """What the chat template writes between the last message and the answer; empty without a template."""
        if not self.has_chat_template:
            return ""
        text = self.chat_prompt([{"role": "user", "content": _ANY_QUESTION}])
        return text[len(_up_to(text, _ANY_QUESTION)) :]

    def added_token(self, text: str) -> int | None:
        """The id of a token that is matched whole, such as `<|im_end|>`, or None."""
        return self._added.get(text)

    @property
    def fingerprint(self) -> str:
        """A name that changes with the chat template. The harness uses it as a key for its prompts."""
        template = hashlib.sha256((self.chat_template or "").encode()).hexdigest()[:8]
        return f"{self.folder.name}-{template}"


@contextmanager
def _told_apart(folder: Path) -> Iterator[None]:
    """Turns any error of the tokenizer's libraries into one about the folder: its files may be damaged in any way."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"no usable tokenizer in {folder}: {lines[0]}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # from the tokenizers' Rust code; its only base is BaseException
            raise
        raise UsageError(f"no usable tokenizer in {folder}: {error}") from None


def _up_to(text: str, content: str) -> str:
    """A conversation up to the end of its last message, without the marks that close it. Templates may strip texts."""
    kept = next((part for part in (content, content.strip()) if part in text), None)
    if kept is None:
        raise UsageError("the chat template leaves a message's text out")
    return text[: text.rindex(kept) + len(kept)]
