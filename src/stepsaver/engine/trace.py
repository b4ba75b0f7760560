"""What was executed: a record per forward, with an entry per step. All figures of cost and speed are sums of these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stepsaver.engine.plan import Kind, StepPlan
from stepsaver.engine.positions import NO_POSITIONS, Positions, first_position

DENOISING: tuple[Kind, ...] = ("full", "sub", "reused", "draft")  # the kinds of denoising steps
COMPUTED_STEPS: tuple[Kind, ...] = ("full", "sub")  # steps of block diffusion that compute rows


class SampleStep(NamedTuple):
    """One sample's share of a forward. Row-layers are rows summed over layers."""

    sample: int
    kind: Kind
    step: int  # index in its block, from 0; for a commit, the number of steps before it
    step_in_sub_block: int
    rows: int
    first_position: int | None  # of a sub-block step, numbered within its block
    context: int  # rows of context that its attention saw, the block included
    attention_run: int
    attention_reused: int
    keys_values_run: int
    mlp_run: int
    mlp_reused: int
    head_rows: int
    unmasked: int  # rows that became tokens
    recomputed_context: int = 0  # rows of context run again because the prefix cache is off
    window: Positions = NO_POSITIONS  # the rows that ran, numbered within its block
    drafted: int = 0  # tokens that were verified
    forward: int = 0  # number of the forward in its trace


class LayersRun(NamedTuple):
    """How many layers ran on at least one row."""

    attention: int = 0
    keys_values: int = 0
    mlp: int = 0


class ForwardRecord(NamedTuple):
    seconds: float  # planning, forward and choices
    forward_seconds: float
    layers: LayersRun
    entries: tuple[SampleStep, ...]
    waiting: int  # samples that did not have a slot yet


@dataclass
class Trace:
    """The records of a run, in order."""

    records: list[ForwardRecord] = field(default_factory=list)
    tokens_generated: int = 0
    tokens_scored: int = 0
    samples: int = 0
    cache_bytes: int = 0
    slots: int = 0
    guesses_right: int = 0  # of tokens that open a block, where commits are joined
    guesses_wrong: int = 0

    def add(self, record: ForwardRecord) -> None:
        """Adds a forward's record. Every forward goes through here, after it was timed."""
        self.records.append(record)

    def add_single_forward(self, seconds: float, plans: Sequence[StepPlan], first_sample: int) -> None:
        """Records a forward of all layers outside the decode loop: for scores by one forward."""
        entries = tuple(
            sample_step(first_sample + index, plan, step=0, context=plan.positions, unmasked=0, recomputed_context=0)
            for index, plan in enumerate(plans)
        )
        layers = len(plans[0].layers)
        self.add(ForwardRecord(seconds, seconds, LayersRun(layers, layers, layers), entries, 0))
        self.samples += len(plans)

    @property
    def entries(self) -> Iterator[SampleStep]:
        return (entry for record in self.records for entry in record.entries)

    @property
    def decode_seconds(self) -> float:
        """Seconds of all forwards and choices, prefill included; without loading, warm-up and tokenization."""
        return sum(record.seconds for record in self.records)

    @property
    def planning_seconds(self) -> float:
        """Seconds of the host outside the forwards: planning, choosing, recording. Rules add to it."""
        return sum(record.seconds - record.forward_seconds for record in self.records)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of prefill. A forward that also does other work is split by the MLP, the most operations."""
        return sum(record.seconds * _prefill_share(record) for record in self.records)

    @property
    def forwards(self) -> int:
        return sum(any(entry.rows for entry in record.entries) for record in self.records)

    @property
    def sample_forwards(self) -> int:
        """The number of forwards each sample took part in, summed over samples, not counting prefills."""
        return sum(
            len({entry.sample for entry in record.entries if entry.rows and entry.kind != "prefill"})
            for record in self.records
        )

    @property
    def slots_filled(self) -> float:
        """The share of the batch's slots that were in use while other samples waited."""
        busy = [len({entry.sample for entry in r.entries}) for r in self.records if r.waiting and not _prefills(r)]
        return sum(busy) / (len(busy) * self.slots) if busy else 1.0


def _prefill_share(record: ForwardRecord) -> float:
    prefilled = sum(entry.mlp_run for entry in record.entries if entry.kind == "prefill")
    return prefilled / sum(entry.mlp_run for entry in record.entries) if prefilled else 0.0


def _prefills(record: ForwardRecord) -> bool:
    """Whether the forward prefills. Other samples may then have no entry because they wait for a context."""
    return any(entry.kind == "prefill" for entry in record.entries)


def sample_step(
    sample: int,
    plan: StepPlan,
    *,
    step: int,
    step_in_sub_block: int = 0,
    context: int,
    unmasked: int,
    recomputed_context: int,
    drafted: int = 0,
    forward: int = 0,
) -> SampleStep:
    return SampleStep(
        sample=sample,
        kind=plan.kind,
        step=step,
        step_in_sub_block=step_in_sub_block,
        rows=plan.positions,
        first_position=first_position(plan.window) if plan.kind == "sub" else None,
        context=context,
        attention_run=plan.attention_run,
        attention_reused=plan.attention_reused,
        keys_values_run=plan.keys_values_run,
        mlp_run=plan.mlp_run,
        mlp_reused=plan.mlp_reused,
        head_rows=plan.reads.bit_count(),
        unmasked=unmasked,
        recomputed_context=recomputed_context,
        window=plan.window,
        drafted=drafted,
        forward=forward,
    )
