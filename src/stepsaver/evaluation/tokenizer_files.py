"""Reads a checkpoint's tokenizer with the `tokenizers` library alone, because transformers takes seconds to import.
Only the content of the files counts; no transformers class of the named kind is used.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.config import is_there, read_json

CONFIGURATION, SPECIAL_TOKENS, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
VOCABULARY, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
# How a text is split before merges apply. If there is only a vocabulary and merges, the files do not say it.
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
MOST_GROWTH = 64  # sentencepiece's texts grow threefold at most
LISTS_OF_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")


class TokenizerFiles(NamedTuple):
    """A folder's tokenizer, special texts and chat template."""

    tokenizer: Tokenizer
    special_texts: dict[str, str]  # such as the text of `eos_token`, for chat templates
    chat_template: str | None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    configuration = read_json(folder / SPECIAL_TOKENS) | read_json(folder / CONFIGURATION)
    tokenizer = _tokenizer(folder, configuration)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(folder, tokenizer, configuration)
    texts = {name: text for name, value in configuration.items() if name.endswith("_token") and (text := _text(value))}
    return TokenizerFiles(tokenizer, texts, _chat_template(folder, configuration))


def _tokenizer(folder: Path, configuration: dict[str, Any]) -> Tokenizer:
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", VOCABULARY, MERGES))
    if is_there(whole):
        tokenizer = Tokenizer.from_file(str(whole))
        _check_growth(tokenizer)
        return tokenizer
    if is_there(vocabulary) and is_there(merges) and configuration.get("tokenizer_class") in QWEN2_CLASSES:
        return _qwen2(vocabulary, merges)
    return _by_transformers(folder)


def _check_growth(tokenizer: Tokenizer) -> None:
    """Refuses steps around the model that make texts much longer: one after another, they would fill the memory."""
    around = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder)
    steps = [json.loads(each.__getstate__()) for each in around if each is not None]
    grown = 1
    while steps and grown <= MOST_GROWTH:
        step = steps.pop()
        if isinstance(step, list):
            steps += step
        elif isinstance(step, dict):
            grown *= max(len(step.get("content") or step.get("prepend") or ""), 1)  # of Replace and Prepend
            grown += "Sequence" in step  # of a template, which may repeat the text
            steps += [each for each in step.values() if isinstance(each, list | dict)]
    if grown > MOST_GROWTH:
        raise UsageError(f"it makes a text more than {MOST_GROWTH} times as long")


def _qwen2(vocabulary: Path, merges: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _by_transformers(folder: Path) -> Tokenizer:
    """Converts other kinds of files with transformers, if it is installed."""
    names = ("tokenizer.model", VOCABULARY, "vocab.txt")
    if not any((folder / name).exists() for name in names):
        raise UsageError("it has no tokenizer.json; without one, prompts are token ids (--ids, in Python ids=True)")
    try:
        import transformers
    except ImportError:
        raise UsageError("it has no tokenizer.json; `pip install transformers` to convert what it has") from None
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns about unknown model types; only files count here
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return tokenizer.backend_tokenizer
    finally:
        transformers.logging.set_verbosity(level)


def _add_tokens(folder: Path, tokenizer: Tokenizer, configuration: dict[str, Any]) -> None:
    """Adds tokens that only the other files name, with their ids from there, and marks special ones."""
    known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    special = set(_special_tokens(configuration))
    for index, token in _declared_tokens(folder, configuration):
        if token.content in known and (known[token.content] or not token.special):
            continue
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        known[token.content] = token.special
        if (found := tokenizer.token_to_id(token.content)) != index:
            raise UsageError(f"added token {shown(token.content)} has the id {index}, and it would get {found}")
    missing = sorted(text for text in special if not known.get(text))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _declared_tokens(folder: Path, configuration: dict[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Tokens outside the base vocabulary, by id."""
    declared = configuration.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = {
        int(index): AddedToken(entry["content"], **{name: bool(entry[name]) for name in flags if name in entry})
        for index, entry in declared.items()
    }
    for text, index in read_json(folder / ADDED).items():
        found.setdefault(index, AddedToken(text, normalized=False))
    return iter(sorted(found.items(), key=lambda each: each[0]))


def _special_tokens(configuration: dict[str, Any]) -> Iterator[str]:
    for name, value in configuration.items():
        values = [value] if name.endswith("_token") else value if name in LISTS_OF_SPECIAL_TOKENS else []
        yield from filter(None, map(_text, values.values() if isinstance(values, dict) else values or []))


def _text(value: Any) -> str | None:
    """The text of a token, which the files give alone or with flags."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, configuration: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE
    if is_there(path):
        return path.read_text(encoding="utf-8")
    template = configuration.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {each["name"]: each["template"] for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
