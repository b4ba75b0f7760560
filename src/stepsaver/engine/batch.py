"""The settings of a batch, and how one forward is executed: plans in, proposals out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Join
from stepsaver.engine.forward import Executed, Memory, StepOutput, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan, prefill_plan
from stepsaver.engine.positions import Positions
from stepsaver.engine.rules.rule import plan_rest
from stepsaver.engine.sampling import NonFiniteLogits, Proposals, Sampling, propose, uniform
from stepsaver.engine.state import BlockState, Sample
from stepsaver.engine.trace import LayersRun
from stepsaver.engine.view import StepView, step_view

if TYPE_CHECKING:
    from stepsaver.engine.curve import Curve
    from stepsaver.engine.decoders.decoder import Decoder

USUAL_CONTEXT = 128  # tokens before a block, where nobody knows yet how many there will be


GUESSED_RIGHT = 0.8  # share of block openings guessed right, a careful figure: the embedded model had 301 of 310


class Joins(NamedTuple):
    """Which forwards are run as one."""

    prefill: bool  # a prefill and the first step of the first block
    commits: bool  # a commit and the first step of the next block, whose first token is guessed


def resolve_joins(join: Join, *, curve: "Curve | None", batch_size: int, block_size: int) -> Joins:
    """`auto`: a prefill is joined, which costs nothing. A commit is, where one forward of twice as many positions,
    and another one for each wrong guess, take less than two. If nobody has measured that, it is not.
    """
    if join != "auto":
        return Joins(join == "on", join == "on")
    if curve is None:
        return Joins(prefill=True, commits=False)
    apart, joined = (curve.seconds(count * batch_size * block_size, USUAL_CONTEXT) for count in (1, 2))
    return Joins(prefill=True, commits=joined + (1 - GUESSED_RIGHT) * apart < 2 * apart)


class Branch(NamedTuple):
    """What speculative decoding drafted in case that so many tokens are accepted."""

    accepted: int
    tokens: tuple[int, ...]  # for the positions behind the one that the forward writes after those
    is_taken: bool  # so many were: it is the next draft


class StepEvent(NamedTuple):
    """What one sample's step did, for `on_step`."""

    sample: Sample
    plan: StepPlan
    start: int  # the block's first position in the text
    sub_block: Positions
    changed: Positions  # before the step: positions whose token differs from the one they were last computed with
    tokens: NDArray[np.int64]  # before the step: of the block; of a draft or verification and the position after it
    masked: Positions  # before the step
    proposed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    unmasked: Positions
    unruled: StepPlan  # what the step would run if there were no rules
    branches: tuple[Branch, ...] = ()


class Outcome(NamedTuple):
    """What a step led to: how many positions became tokens, and the event for `on_step`."""

    unmasked: int
    event: StepEvent | None = None
    guess: Literal["right", "wrong"] | None = None  # for a step that ran before its block's first token was known
    drafted: int = 0  # tokens that were verified


@dataclass(frozen=True)
class BatchContext:
    """Everything that stays the same while a batch is decoded."""

    model: Transformer
    memory: Memory
    decoder: "Decoder"
    decoding: DecodingSettings
    sampling: Sampling
    slots: int
    curve: "Curve | None" = None  # what a forward costs here; None: nobody has measured it
    checked: bool = False  # prove before each step that nothing stale is read
    on_step: Callable[[StepEvent], None] | None = None
    finished: Callable[[list[int]], bool] | None = None
    remembered: dict[Any, Any] = field(default_factory=dict)  # what a decoder need not decide again

    @cached_property
    def joins(self) -> Joins:
        """Which steps share a forward. With a delta cache, none do: a block's deltas overwrite those of the block
        before it, so two blocks of a sample cannot run at once.
        """
        if not self.decoding.prefix_cache or self.memory.deltas is not None:
            return Joins(prefill=False, commits=False)
        return resolve_joins(
            self.decoding.join,
            curve=self.curve,
            batch_size=self.slots,
            block_size=self.decoding.block_size,
        )

    @cached_property
    def keeps_layer_history(self) -> bool:
        """Whether blocks note which tokens each layer was computed with: for rules that reuse deltas and for checks."""
        return self.checked or self.memory.deltas is not None


class ScheduledStep(NamedTuple):
    """A step of a sample that is to run in the next forward, its block, and what the rules saw before it.

    A sample may have several steps in one forward: every position's keys and values are written before any position
    attends.
    """

    sample: Sample
    block: BlockState
    step: Step
    view: StepView | None = None  # None: rules do not act on this step
    targets: tuple[int, ...] | None = None  # to score at each position that is read; None: the sample's own

    @property
    def plan(self) -> StepPlan:
        return self.step.plan


class StepGroup(NamedTuple):
    """Steps of a forward that belong together, and the function that acts on what was proposed for them."""

    steps: list[ScheduledStep]
    act: Callable[[list[ScheduledStep], list[Proposals]], list[Outcome]]  # gets the steps as they ran; one outcome each


def next_steps(batch: BatchContext, sample: Sample) -> StepGroup:
    """What the sample's decoder does next."""
    return StepGroup(batch.decoder.next_steps(batch, sample), partial(batch.decoder.postprocess, batch))


class Execution(NamedTuple):
    """The result of a forward: the steps with their plans as they ran, and proposals for what their reads predict."""

    steps: list[ScheduledStep]
    proposals: list[Proposals]
    layers: LayersRun
    seconds: float


def execute(batch: BatchContext, scheduled: list[ScheduledStep]) -> Execution:
    """Runs all plans that are not empty in one forward."""
    started = perf_counter()
    running = [index for index, each in enumerate(scheduled) if not each.plan.is_empty]
    if not running:
        return Execution(scheduled, [_NOTHING] * len(scheduled), LayersRun(), 0.0)
    if not batch.decoding.prefix_cache:
        _recompute_contexts(batch, scheduled)
    memory = batch.memory
    if scheduled[running[0]].plan.kind == "prefill":
        memory = memory._replace(deltas=None)
    blocks = [scheduled[index].block for index in running]
    output = run_step(
        batch.model, memory, [scheduled[index].step for index in running], partial(_plan_again, batch, blocks)
    )
    _check_executed(output.executed, [step.plan for step in output.steps])
    final = list(scheduled)
    for index, step in zip(running, output.steps, strict=True):
        final[index] = scheduled[index]._replace(step=step)
    proposals, drift = _propose(batch, final, output)
    if output.drift is not None:
        _note_drift(blocks, output.steps, drift)
    executed = output.executed
    layers = LayersRun(executed.attention_layers, executed.keys_values_layers, executed.mlp_layers)
    return Execution(final, proposals, layers, perf_counter() - started)


def _propose(
    batch: BatchContext, scheduled: list[ScheduledStep], output: StepOutput
) -> tuple[list[Proposals], NDArray[np.float64]]:
    """Each step's proposals, and the drift of all positions if measured: the forward's one transfer to the host."""
    reads = [each.plan.reads.bit_count() for each in scheduled]
    uniforms = [] if batch.sampling.is_greedy else _uniforms(batch, scheduled)
    try:
        proposals = propose(
            output.logits,
            mask_id=batch.decoding.mask_id,
            sampling=batch.sampling,
            uniforms=uniforms,
            targets=_targets(scheduled),
            beside=output.drift,
            backend=batch.model.fused,
        )
    except NonFiniteLogits as error:
        raise _named(error, scheduled, reads) from None
    ends = np.cumsum(reads)
    split = [
        Proposals(
            proposals.tokens[end - count : end],
            proposals.confidence[end - count : end],
            proposals.target_scores[end - count : end],
        )
        for end, count in zip(ends, reads, strict=True)
    ]
    return split, proposals.beside


def _targets(scheduled: list[ScheduledStep]) -> list[tuple[int, ...]]:
    """The tokens to score for each position that is read; an empty list if there are none."""
    if not any(each.sample.request.writer.has_targets for each in scheduled):
        return []
    targets = [
        each.sample.request.writer.targets(position) if each.targets is None else each.targets
        for each, position in _predicted_positions(scheduled)
    ]
    return targets if any(targets) else []


def _predicted_positions(scheduled: list[ScheduledStep]) -> Iterator[tuple[ScheduledStep, int]]:
    """For each position that is read, the position whose token it predicts."""
    return ((each, position) for each in scheduled for position in each.step.predicted())


def _plan_again(batch: BatchContext, blocks: list[BlockState], steps: Sequence[Step], drift_N: Tensor) -> list[Step]:
    """In the middle of a forward: rules that asked for the drift may take work away from the layers that follow."""
    planned: list[Step] = []
    drifts = _split_rows(steps, drift_N.double().cpu().numpy())
    for block, step, drift in zip(blocks, steps, drifts, strict=True):
        if step.plan.ask_after is None:
            planned.append(step)
            continue
        block.record_drift(step.plan, drift)
        planned.append(step._replace(plan=plan_rest(step.plan, view_of(batch, block), batch.decoder.rules)))
    return planned


def _note_drift(blocks: list[BlockState], steps: Sequence[Step], drift_N: NDArray[np.float64]) -> None:
    """Notes the drift of samples whose rules were not asked during the forward; asking notes it too."""
    for block, step, drift in zip(blocks, steps, _split_rows(steps, drift_N), strict=True):
        if step.plan.ask_after is None and step.plan.kind != "commit":
            block.record_drift(step.plan, drift)


def _split_rows(steps: Sequence[Step], values_N: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return np.split(values_N, np.cumsum([step.plan.positions for step in steps])[:-1])


def view_of(batch: BatchContext, block: BlockState) -> StepView:
    decoding = batch.decoding
    return step_view(
        block,
        layers=batch.model.config.layers,
        prediction=decoding.prediction,
        sub_block_size=decoding.sub_block_size,
        block_cache=decoding.block_cache,
    )


_NOTHING = Proposals(np.empty(0, dtype=np.int64), np.empty(0), [])


def _recompute_contexts(batch: BatchContext, scheduled: list[ScheduledStep]) -> None:
    """Without a prefix cache every forward runs the context again."""
    for each in scheduled:
        context = each.sample.context
        if each.plan.is_empty or each.plan.kind == "prefill" or not context:
            continue
        plan = prefill_plan(len(context), reads_last=False, layers=batch.model.config.layers)
        block_size = batch.decoder.context_block_size(batch.decoding)
        step = Step(each.sample.slot, 0, np.array(context), block_size, plan)
        run_step(batch.model, batch.memory._replace(deltas=None), [step])


def _check_executed(executed: Executed, plans: list[StepPlan]) -> None:
    """Asserts that the sublayers ran what the plans said. A rule that claims reuse and skips nothing fails here."""
    planned = (
        sum(plan.attention_run for plan in plans),
        sum(plan.keys_values_run for plan in plans),
        sum(plan.mlp_run for plan in plans),
        sum(plan.reads.bit_count() for plan in plans),
    )
    counted = (executed.attention, executed.keys_values, executed.mlp, executed.head)
    assert counted == planned, f"position-layers executed {counted} differ from the plan's {planned}"


def _uniforms(batch: BatchContext, scheduled: list[ScheduledStep]) -> list[float]:
    """One random number per position that is read, to draw the token it predicts."""
    return [
        uniform(batch.sampling.seed, each.sample.request.key, position, each.block.steps)
        for each, position in _predicted_positions(scheduled)
    ]


def _named(error: NonFiniteLogits, scheduled: list[ScheduledStep], reads: list[int]) -> NonFiniteLogits:
    each = scheduled[int(np.searchsorted(np.cumsum(reads), error.row, side="right"))]
    return NonFiniteLogits(
        error.row,
        f"logits are not finite: sample {each.sample.index}, block at position {each.step.start}, "
        f"step {each.block.steps} ({each.plan.kind})",
    )
