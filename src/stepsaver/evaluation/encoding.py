"""Turns a request's text into ids that fit the model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepsaver.engine.errors import UsageError, shown
from stepsaver.evaluation.tokenizer import TextTokenizer

ROLES = ("system", "user", "assistant")


class EncodedPair(NamedTuple):
    context: tuple[int, ...]
    continuation: tuple[int, ...]


class FittedPrompt(NamedTuple):
    """Ids that fit, and how many were cut from the left."""

    ids: tuple[int, ...]
    cut: int


def checked_text(text: str, where: str) -> str:
    """Refuses text that cannot be encoded: half of a surrogate pair, or bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: character {error.start} is not valid Unicode: {shown(text[error.start])}") from None
    return text


def encode_prompt(tokenizer: TextTokenizer, text: str, *, chat: bool) -> tuple[int, ...]:
    """The ids of a prompt: as a user's message if the model has a chat template, else unchanged."""
    if chat and tokenizer.has_chat_template:
        text = tokenizer.chat_prompt([{"role": "user", "content": text}])
    return tuple(tokenizer.encode(text))


def encode_messages(tokenizer: TextTokenizer, messages: Sequence[Any], where: str) -> tuple[int, ...]:
    """The ids of a conversation, up to where its answer begins or goes on."""
    return tuple(tokenizer.encode(conversation(tokenizer, messages, where)))


def conversation(tokenizer: TextTokenizer, messages: Sequence[Any], where: str) -> str:
    """The text of a conversation. If its last message is the assistant's, that is left open."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(f"{where}: {shown(messages)} is not a list of messages")
    for message in messages:
        is_whole = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not is_whole or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise UsageError(
                f"{where}: {shown(message)} is not a message: expected a role, one of {', '.join(ROLES)}, and a content"
            )
        checked_text(message["content"], where)
    return tokenizer.chat_prompt(messages, opens_answer=messages[-1]["role"] != "assistant")


def context_text(tokenizer: TextTokenizer, context: str | Sequence[Any], where: str, *, chat: bool) -> str:
    """The text of a context that is scored: a conversation, with `chat` a user's message, or the text itself."""
    if isinstance(context, str) and not chat:
        return context
    return conversation(
        tokenizer, [{"role": "user", "content": context}] if isinstance(context, str) else context, where
    )


def encode_pair(tokenizer: TextTokenizer, context: str, continuation: str) -> EncodedPair:
    """Encodes the context alone, and both texts together. What follows the context's ids is the continuation.

    So a word keeps the token it has in running text. White space that the task wrote between the two belongs to the
    continuation, as in the harness. White space at the end of the chat template stays in the prompt: if it were moved,
    it would be scored instead of the answer.
    """
    whole = tokenizer.encode(context + continuation)
    if not _is_opened_by_template(tokenizer, context):
        before = tokenizer.encode(context.rstrip())
        return EncodedPair(tuple(before), tuple(whole[len(before) :]))
    before = tokenizer.encode(context)
    is_split_there = whole[: len(before)] == before  # white space on both sides may become one token
    return EncodedPair(tuple(before), tuple(whole[len(before) :] if is_split_there else tokenizer.encode(continuation)))


def _is_opened_by_template(tokenizer: TextTokenizer, context: str) -> bool:
    opening = tokenizer.answer_opening
    return bool(opening.strip()) and context.endswith(opening)  # mere white space could be the task's too


def fit_left(ids: tuple[int, ...], *, room: int, after: int, what: str) -> FittedPrompt:
    """Cuts a prompt from the left so that it and `after` more tokens fit into `room` positions."""
    most = room - after
    if most < 1:
        raise UsageError(f"{what}: {after} tokens leave no room for a prompt in the model's {room} positions")
    return FittedPrompt(ids[-most:], max(len(ids) - most, 0))
