"""Three tasks that need more than lm-eval's own files: GPQA's choices, IFEval's data, HumanEval's sandbox.

GPQA: lm-eval shuffles the choices with one running generator each time it reads the documents. With a cold cache it
reads them twice, once to prompt and once to score, so the right letters of the two orders are unrelated. Here the order
depends only on the question.

HumanEval: lm-eval's own scorer downloads code when its module is imported, and runs programs without a sandbox. Here
each completion runs in a sandbox, and its tests in another one. Prompts, stop strings, the filter and the metric's key
stay lm-eval's.
"""

import hashlib
import random
from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.sandbox import run_program

LANGUAGE_SEED = 0


def shuffled_documents(dataset: Any) -> Any:
    """Replaces GPQA's own `process_docs` and gives the same fields."""
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


def require_ifeval() -> None:
    """Checks for NLTK's sentence data, and fixes the seed of language detection, which is else random."""
    try:
        import langdetect
        import nltk
    except ModuleNotFoundError as error:
        raise UsageError(f"ifeval needs {error.name}: pip install 'lm_eval[ifeval]'") from None
    langdetect.DetectorFactory.seed = LANGUAGE_SEED
    try:
        nltk.data.find("tokenizers/punkt_tab/english")
    except LookupError:
        raise UsageError(
            "ifeval needs NLTK's punkt_tab: run `python -m nltk.downloader punkt_tab`, or unpack it into "
            "tokenizers/ of a folder named by NLTK_DATA"
        ) from None


def scorer_changes(task: str) -> dict[str, Any]:
    """Our changes to the official task: the filter that completes the program, and the metric that runs it.

    The tests of three problems use functions of their prompt. So the prompt is put before the tests too, where no
    program can change it.
    """
    build = build_instruct_predictions if task.endswith("_instruct") else build_predictions
    return {
        "doc_to_target": "{{prompt}}\n{{test}}\ncheck({{entry_point}})",
        "metric_list": [{"metric": pass_at_k, "aggregation": "mean", "higher_is_better": True, "k": [1]}],
        "filter_list": [{"name": "create_test", "filter": [{"function": "custom", "filter_fn": build}]}],
    }


def build_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The whole program: the prompt and what the model wrote after it."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def build_instruct_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The same for answers inside a code fence. The end of the fence ends the answer."""
    fenced = [[text.partition("```")[0] for text in texts] for texts in resps]
    return build_predictions(fenced, docs)


def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
    """The share of programs that pass their tests. lm-eval takes the metric's key from this function's result."""
    assert k == [1], "one completion per problem"
    passed = [
        run_program(program, tests, entry_point=entry_point).passed
        for (tests, entry_point), programs in zip(map(split_reference, references), predictions, strict=True)
        for program in programs
    ]
    return {"pass@1": sum(passed) / len(passed)}


def split_reference(reference: str) -> tuple[str, str]:
    """The tests, and the name of the function that their last line passes to `check`."""
    tests, mark, call = reference.rstrip().rpartition("\ncheck(")
    entry_point = call.removesuffix(")")
    if not mark or not entry_point.isidentifier():
        raise UsageError(f"HumanEval's tests end with check(FUNCTION), these with {reference[-40:]!r}")
    return tests, entry_point
