"""HumanEval's scorer: each completion is run with its tests in the sandbox.

lm-eval's own scorer downloads code when its module is imported and runs programs without walls. Prompts, stop strings,
the filter and the metric's key stay lm-eval's.
"""

from typing import Any

from stepsaver.evaluation.sandbox import Limits, run_program


def scorer_changes(task: str) -> dict[str, Any]:
    """What is laid over the official task: the filter that completes the program, and the metric that runs it."""
    build = build_instruct_predictions if task.endswith("_instruct") else build_predictions
    return {
        "metric_list": [{"metric": pass_at_k, "aggregation": "mean", "higher_is_better": True, "k": [1]}],
        "filter_list": [{"name": "create_test", "filter": [{"function": "custom", "filter_fn": build}]}],
    }


def build_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The whole program: the prompt and what the model wrote behind it."""
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(resps, docs, strict=True)]


def build_instruct_predictions(resps: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """The same for answers inside a code fence, which ends them."""
    fenced = [[text.partition("```")[0] for text in texts] for texts in resps]
    return build_predictions(fenced, docs)


def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
    """The share of programs that pass their tests. lm-eval finds the metric's key by this function's result."""
    assert k == [1], "one completion per problem"
    passed = [
        run_program(f"{program}\n{tests}", Limits()).passed
        for tests, programs in zip(references, predictions, strict=True)
        for program in programs
    ]
    return {"pass@1": sum(passed) / len(passed)}
