"""A tokenizer for tests: one token per byte. Any text survives it, and every character beyond ASCII is split."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MASK, END, USER, ASSISTANT, SYSTEM = SPECIAL = ("|<MASK>|", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
MASK_ID, END_ID = 0, 1
VOCABULARY = len(SPECIAL) + 256
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_byte_tokenizer(folder: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "additional_special_tokens": [MASK, USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder
