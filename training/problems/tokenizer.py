"""The embedded model's tokenizer: whole words, single digits, and the space as the start of the next piece.

A text is treated as if it began with a space, so a word is the same token at the start of an answer and inside a
prompt. That is easier for a small model to copy. A number has one token per digit.
"""

import json
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from training.problems.catalog import MAKERS
from training.problems.problem import problems

UNKNOWN, MASK, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|unknown|>", "<|mask|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
)  # fmt: skip
UNKNOWN_ID, MASK_ID, END_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID = range(len(SPECIAL_TOKENS))
SPACE = "▁"
PIECE = rf"{SPACE}?[A-Za-z]+|{SPACE}?[0-9]|{SPACE}?#+|\n|{SPACE}?[^A-Za-z0-9\s#{SPACE}]|\s|{SPACE}"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCANNED_PROBLEMS = 4_000  # far fewer would contain every piece; tests tokenize all test files


def build_tokenizer() -> Tokenizer:
    """The tokenizer for every piece that occurs in the first problems of each task."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
        ]
    )
    pieces: set[str] = set()
    for make in MAKERS.values():
        for problem in islice(problems(make, seed=0, split="train"), SCANNED_PROBLEMS):
            for text in (problem.prompt, problem.answer):
                pieces.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *sorted(pieces)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=False)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def prompt_text(prompt: str) -> str:
    """One user message as the chat template writes it."""
    return f"{USER}{prompt}{END}{ASSISTANT}"


def write_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json`, its configuration for transformers and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "mask_token": MASK,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
