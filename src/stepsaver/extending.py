"""What you need to write your own rules, policies, architectures and tasks. `examples/own_rule` is a whole example.

A package declares them as entry points of the groups `stepsaver.rules`, `stepsaver.policies`,
`stepsaver.architectures` and `stepsaver.tasks`, under the name by which they are used; rules and policies can also be
given to `Model.generate` and `stepsaver.compare` as objects. Rules and policies are frozen dataclasses:
`name:field=value` sets their fields, which are part of a run's identity. `check_rule` checks a rule as ours are.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepsaver.engine import registry
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.architecture import Architecture
from stepsaver.engine.plan import LayerPositions, StepPlan
from stepsaver.engine.policies.policy import Candidates, Policy, by_confidence
from stepsaver.engine.positions import Positions, position_list, positions_between
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.engine.saved import SavedPositions, positions_computed
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.view import StepView

if TYPE_CHECKING:
    from stepsaver.evaluation.task_registry import TaskDeclaration

__all__ = [
    "Architecture",
    "Candidates",
    "DecodingSettings",
    "LayerPositions",
    "Policy",
    "Positions",
    "Rule",
    "StepPlan",
    "StepView",
    "TaskDeclaration",
    "UsageError",
    "by_confidence",
    "check_rule",
    "position_list",
    "positions_between",
]


def __getattr__(name: str) -> Any:
    if name != "TaskDeclaration":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stepsaver.evaluation.task_registry import TaskDeclaration  # it needs the extra `bench`

    return TaskDeclaration


QUESTIONS = (
    "Tom has 12 pens. Tom buys 9 more. How many pens does Tom have?",
    "What is 3 + 4?",
    "Mia has 20 books and gives 7 books to Leo. Ann has 3 books more than Mia. How many books does Ann have?",
)


def check_rule(rule: Rule) -> float:
    """Checks a rule of your own as ours are checked, on the embedded model in float64; it takes seconds. Raises for the
    first thing that is wrong. Returns the share of positions that the rule left out.

    Its text makes the same rule again. With and without sub-blocks and a prefix cache it only takes work away, exactly
    what its plans say runs, and nothing stale is read: a position whose token has changed runs again. Texts, steps and
    scores are the same in batches and alone.
    """
    from stepsaver.evaluation.encoding import encode_prompt
    from stepsaver.evaluation.open_model import open_model

    registry.adopt(type(rule), "rules")
    text = registry.describe(rule)
    assert parse_rule(text) == rule, f"{text} makes another rule"
    opened = open_model("embedded", dtype="float64")
    model, size = opened.load(), opened.decoding.block_size
    prompts = [encode_prompt(opened.tokenizer, question, chat=True) for question in QUESTIONS]
    shares = []
    for sub_block_size, prefix_cache in ((opened.decoding.sub_block_size, True), (size, True), (4, False)):
        decoding = replace(opened.decoding, sub_block_size=sub_block_size, prefix_cache=prefix_cache)
        try:
            engines = [
                Engine(model, decoder=opened.decoder(rules=rule), decoding=decoding, batch_size=count, checked=True)
                for count in (1, len(prompts))
            ]
        except UsageError:  # the rule says that it cannot work with these settings
            continue
        (alone, share), (together, _) = (_decode_and_score(engine, prompts) for engine in engines)
        assert alone == together, f"{text}: texts, steps or scores depend on the batch"
        shares.append(share)
    assert shares, f"{text} refuses all settings"
    return max(shares)


def _decode_and_score(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[list[Any], float]:
    """Ids, steps and score of each answer, and the share of positions that rules left out."""
    saved = SavedPositions(engine)
    length = 2 * engine.decoding.block_size
    found = sorted(engine.generate(prompts, max_new_tokens=length, on_step=saved), key=lambda each: each.index)
    requests = [ScoreRequest(prompt, tuple(each.ids)) for prompt, each in zip(prompts, found, strict=True)]
    scores = {each.index: round(each.loglikelihood, 6) for each in engine.score(requests)}
    steps = [[each._replace(sample=0, forward=0) for each in completion.steps] for completion in found]
    left_out = sum(saved.of(each.index, each.steps) for each in found)
    computed = sum(positions_computed(each.steps, engine.model.config.layers) for each in found)
    share = left_out / (left_out + computed)
    return [(each.ids, steps[each.index], scores[each.index]) for each in found], share
