"""Text to ids and back, and chat prompts. A small surface over transformers, which is imported only when it is used."""

import hashlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

from stepsaver.engine.errors import UsageError

_ANY_QUESTION = "a question that no template contains"


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class TextTokenizer:
    """The tokenizer of a model folder. No checkpoint's code runs, and encoding adds no tokens of its own accord.

    A chat template writes the special tokens it wants into the text, and the harness's own adapter adds none either.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _load(folder)
        self._special = {str(token): int(i) for token, i in self._tokenizer.get_added_vocab().items()}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )

    def token_text(self, token: int) -> str:
        """What a token adds to a text. Some decoders drop the space before a text's first token, so it goes second."""
        alone, twice = self.decode([token], keep_special=True), self.decode([token, token], keep_special=True)
        return twice[len(alone) :] if twice.startswith(alone) else alone

    @property
    def chat_template(self) -> str | None:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def chat_prompt(self, messages: Sequence[Message], *, opens_answer: bool = True) -> str:
        """The text that a conversation becomes.

        `opens_answer` ends it where the answer begins; without it the last message, an answer's beginning, stays open.
        """
        if not self.has_chat_template:
            raise UsageError(f"the tokenizer in {self.folder} has no chat template")
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=opens_answer
        )
        return text if opens_answer else _up_to(text, messages[-1]["content"])

    @cached_property
    def answer_opening(self) -> str:
        """What the chat template writes between the last message and the answer; nothing without a template."""
        if not self.has_chat_template:
            return ""
        text = self.chat_prompt([{"role": "user", "content": _ANY_QUESTION}])
        return text[text.rindex(_ANY_QUESTION) + len(_ANY_QUESTION) :]

    def added_token(self, text: str) -> int | None:
        """The id of a token that is matched whole, such as `<|im_end|>`, or None."""
        return self._special.get(text)

    @property
    def fingerprint(self) -> str:
        """A name that changes with the chat template; the harness keys its prompts by it."""
        template = hashlib.sha256((self.chat_template or "").encode()).hexdigest()[:8]
        return f"{self.folder.name}-{template}"


def _load(folder: Path) -> Any:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it remarks on model types that it does not know; only files count here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"no usable tokenizer in {folder}: {reason}") from None
    finally:
        transformers.logging.set_verbosity(level)
    template = folder / "chat_template.jinja"
    if tokenizer.chat_template is None and template.exists():  # transformers before 4.50 do not look for the file
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _up_to(text: str, content: str) -> str:
    """A conversation up to the end of its last message, without the marks that close it. Templates may strip it."""
    kept = next(part for part in (content, content.strip()) if part in text)
    return text[: text.rindex(kept) + len(kept)]
