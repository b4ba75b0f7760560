"""The steps of a chunk in short: equal steps are counted, so that a ceiling can be computed long after the run."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from stepsaver.engine.cost import ceiling
from stepsaver.engine.engine import Engine
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.trace import DENOISING, ForwardRecord, LayersRun, SampleStep, Trace

# Sample, window and what was revealed do not change a step's cost. Context is summed: operations grow linearly with it.
LEFT_OUT = ("sample", "context", "revealed", "window")
FIELDS = tuple(name for name in SampleStep._fields if name not in LEFT_OUT)
WITHOUT_COST = ("step", "step_in_sub_block", "first_row")  # when a step was taken: only a ceiling depends on it

Group = tuple[Any, ...]
StepCounts = list[list[Any]]  # per group of equal steps: how many, the sum of their contexts, then FIELDS


def count_steps(trace: Trace) -> StepCounts:
    steps: Counter[Group] = Counter()
    contexts: Counter[Group] = Counter()
    for entry in trace.entries:
        group = tuple(getattr(entry, name) for name in FIELDS)
        steps[group] += 1
        contexts[group] += entry.context
    return [[number, contexts[group], *group] for group, number in steps.items()]


def merge_counts(chunks: Iterable[StepCounts]) -> StepCounts:
    """Returns the steps of several chunks, in one entry per kind of work."""
    numbers: Counter[Group] = Counter()
    contexts: Counter[Group] = Counter()
    unimportant = [FIELDS.index(name) for name in WITHOUT_COST]
    for counts in chunks:
        for number, context, *fields in counts:
            group = list(fields)
            for index in unimportant:
                group[index] = 0
            numbers[tuple(group)] += number
            contexts[tuple(group)] += context
    return [[number, contexts[group], *group] for group, number in numbers.items()]


def counted_ceiling(engine: Engine, rules: tuple[Rule, ...], chunks: Iterable[StepCounts]) -> float | None:
    """Returns the ceiling of declared rules over the counted steps of the baseline; None if no step was taken."""
    totals: dict[Group, list[int]] = defaultdict(lambda: [0, 0])
    for counts in chunks:
        for number, context, *fields in counts:
            total = totals[tuple(fields)]
            total[0] += number
            total[1] += context
    entries = [entry for group, (number, context) in totals.items() for entry in _entries(group, number, context)]
    if not any(entry.kind in DENOISING for entry in entries):
        return None
    trace = Trace(records=[ForwardRecord(0.0, 0.0, LayersRun(), tuple(entries), 0)])
    return ceiling(engine.model.config, trace, rules, engine.decoding)


def _entries(group: Group, number: int, context: int) -> list[SampleStep]:
    """Returns one step with the work of all of them: a rule may reuse a share of it, the same for each.

    The cost of a recomputed context grows with its square, so steps that have one stay single.
    """
    fields = dict(zip(FIELDS, group, strict=True))
    step = SampleStep(sample=0, context=context / number, revealed=0, **fields)  # type: ignore[arg-type]
    if step.recomputed_context:
        return [step] * number
    return [
        step._replace(
            attention_run=step.attention_run * number,
            keys_values_run=step.keys_values_run * number,
            mlp_run=step.mlp_run * number,
            head_rows=step.head_rows * number,
            rows=step.rows * number,
        )
    ]
