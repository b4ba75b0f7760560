"""HumanEval's scorer: each completion runs in a sandbox, and its tests in another one.

lm-eval's own scorer downloads code when its module is imported, and runs programs without a sandbox. Prompts, stop
strings, the filter and the metric's key stay lm-eval's.
"""

from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.sandbox import run_program


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
