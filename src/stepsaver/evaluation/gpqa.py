"""GPQA's choices in an order that depends only on the question.

lm-eval shuffles them with one running generator each time it reads the documents. With a cold cache it reads them
twice, once to prompt and once to score, so the right letters of the two orders are unrelated.
"""

import hashlib
import random
from typing import Any

DATASET = "Idavidrein/gpqa"


def process_docs(dataset: Any) -> Any:
    """Replaces the official function of this name and gives the same fields."""
    return dataset.map(shuffle_choices)


def shuffle_choices(document: dict[str, Any]) -> dict[str, Any]:
    """Four choices and the letter of the right one. The seed is a hash of the question, the same in every process."""
    right = _cleaned(document["Correct Answer"])
    choices = [*(_cleaned(document[f"Incorrect Answer {number}"]) for number in (1, 2, 3)), right]
    seed = int.from_bytes(hashlib.sha256(document["Question"].encode()).digest()[:8])
    random.Random(seed).shuffle(choices)
    fields = {f"choice{number}": choice for number, choice in enumerate(choices, start=1)}
    return {**fields, "choices": choices, "answer": f"({'ABCD'[choices.index(right)]})"}


def _cleaned(text: str | None) -> str:
    """Cleans a text as the official task does."""
    return " " if text is None else text.strip().replace(" [title]", ". ").replace("  ", " ")
