"""A decode as data to look at: a frame per step, as JSON that a page can hold.

A `TraceRecorder` watches the denoising steps. What it cannot see, prefills and commits, is in the completion's steps.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypedDict

import numpy as np

from stepsaver.engine import registry
from stepsaver.engine.batch import StepEvent
from stepsaver.engine.engine import Completion, Engine
from stepsaver.engine.plan import StepPlan, commit_plan
from stepsaver.engine.positions import NO_POSITIONS, Positions, describe, position_list, positions_between
from stepsaver.engine.saved import SavedPositions
from stepsaver.engine.trace import SampleStep

Text = Callable[[int], str]


class Proposal(NamedTuple):
    """What the model would put into a masked row, and how sure it is."""

    row: int
    token: int
    confidence: float


class ShownLayers(NamedTuple):
    """Consecutive layers, first to last - 1, and the rows that each kind of work runs on."""

    first: int
    last: int
    carried: str
    attention: str
    keys_values: str
    mlp: str


class ShownBranch(TypedDict):
    """What speculative decoding drafted in case that so many tokens are accepted; taken: so many were."""

    accepted: int
    tokens: list[int]
    is_taken: bool


class Totals(TypedDict):
    """The sample's totals up to this frame, including it. Row-layers are rows summed over layers."""

    tokens: int
    forwards: int
    attention_run: int
    attention_reused: int
    mlp_run: int
    mlp_reused: int


class Frame(TypedDict):
    """One step of one sample. Sets of rows are written as ranges, `8-15,20` or `none`, counted within the block."""

    kind: str
    start: int  # position of the block's first row; of the context's first row in a prefill
    tokens: list[int]  # of the block, before the step; none in a prefill
    rows: int
    hidden: str  # not there yet: neither computed nor attended to
    sub_block: str
    changed: str
    proposals: list[Proposal]
    unmasked: str
    accepted: str  # of a verification: drafted rows that it would have written itself
    rejected: str  # and those that it would not, or that come after one
    branches: list[ShownBranch]
    layers: list[ShownLayers]
    positions: list[int]  # in the text, whose tokens became known in this frame
    totals: Totals


class Run(TypedDict):
    """One sample as one engine decoded it."""

    ids: list[int]
    finish: str
    saved: int  # positions that rules left out
    frames: list[Frame]


class Difference(TypedDict):
    """The first step, in either of two runs, that put a token where the other run has another one."""

    position: int
    frame: int


class TracedSample(TypedDict):
    prompt: list[int]
    runs: list[Run]
    difference: Difference | None


class TraceDocument(TypedDict):
    model: str
    layers: int
    block_size: int
    mask_id: int
    policy: str
    engines: list[str]  # the rules of each run
    texts: dict[int, str]  # of every token that occurs
    samples: list[TracedSample]


class _Seen(NamedTuple):
    """A denoising step, copied out of the engine's own arrays."""

    plan: StepPlan
    start: int
    tokens: list[int]
    sub_block: Positions
    changed: Positions
    proposals: list[Proposal]
    unmasked: Positions
    branches: list[ShownBranch]


class TraceRecorder:
    """Give it to `Engine.generate` as `on_step`; then ask for the runs of the completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.saved = SavedPositions(engine)
        self._seen: dict[int, list[_Seen]] = defaultdict(list)

    def __call__(self, event: StepEvent) -> None:
        self.saved(event)
        proposals = [
            Proposal(row, int(event.proposed[row]), round(float(event.confidence[row]), 3))
            for row in position_list(event.masked)
            if not np.isnan(event.confidence[row])
        ]
        self._seen[event.sample.index].append(
            _Seen(
                event.plan,
                event.start,
                event.tokens.tolist(),
                event.sub_block,
                event.changed,
                proposals,
                event.unmasked,
                [ShownBranch(accepted=each[0], tokens=list(each[1]), is_taken=each[2]) for each in event.branches],
            )
        )

    def runs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Run]:
        """Returns the runs of completions in the order of their prompts."""
        return [self._run(prompt, each) for prompt, each in zip(prompts, completions, strict=True)]

    def _run(self, prompt: Sequence[int], completion: Completion) -> Run:
        frames = list(self._frames(prompt, completion))
        text = range(len(prompt), len(prompt) + len(completion.ids))
        for frame in frames:  # rows after the stop token are unmasked too, and belong to no text
            frame["positions"] = [position for position in frame["positions"] if position in text]
        steps = zip(completion.steps, accumulate(len(frame["positions"]) for frame in frames), strict=True)
        for frame, totals in zip(frames, _totals(steps), strict=True):
            frame["totals"] = totals
        saved = round(self.saved.of(completion.index, completion.steps))
        return Run(ids=completion.ids, finish=completion.finish, saved=saved, frames=frames)

    def _frames(self, prompt: Sequence[int], completion: Completion) -> Iterator[Frame]:
        decoding, layers = self.engine.decoding, self.engine.model.config.layers
        size = decoding.block_size
        commit = commit_plan(size, layers=layers, prediction=decoding.prediction)
        seen = iter(self._seen[completion.index])
        last: _Seen | None = None
        for step in completion.steps:
            if step.kind == "prefill":
                start, stop = step.context - step.rows, step.context
                yield _frame(step, start, [], positions=[stop] if step.unmasked else [])
            elif step.kind == "commit":
                start = step.context - size
                if last is not None and last.start == start:
                    tokens = _after(last)
                else:  # a block of one row is known without a step
                    tokens = [*prompt, *completion.ids][start : start + size]
                positions = [start + size] if step.unmasked else []
                yield _frame(step, start, tokens, plan=commit.within(step.window), positions=positions)
            else:
                last = next(seen)
                yield _denoising_frame(step, last)


def _after(step: _Seen) -> list[int]:
    tokens = list(step.tokens)
    for row, token, _ in step.proposals:
        if step.unmasked >> row & 1:
            tokens[row] = token
    return tokens


def _denoising_frame(step: SampleStep, seen: _Seen) -> Frame:
    frame = _frame(
        step,
        seen.start,
        seen.tokens,
        plan=seen.plan,
        positions=[seen.start + row for row in position_list(seen.unmasked)],
    )
    frame["sub_block"] = describe(seen.sub_block)
    # in a block's first step nothing has been computed before, so nothing can have changed
    frame["changed"] = describe(seen.changed if step.step else NO_POSITIONS)
    frame["proposals"] = seen.proposals
    frame["unmasked"] = describe(seen.unmasked)
    frame["branches"] = seen.branches
    if step.kind == "verify":
        frame["accepted"], frame["rejected"] = map(describe, _verified(seen))
    return frame


def _verified(seen: _Seen) -> tuple[Positions, Positions]:
    """Returns the drafted rows that a verification kept and those that it threw away.

    The first of the masked rows is behind the known ones, and the row after the last one was not drafted.
    """
    drafted = seen.sub_block & ~positions_between(len(seen.tokens) - 1, len(seen.tokens))
    same = sum(1 << row for row, token, _ in seen.proposals if seen.tokens[row] == token)
    accepted = drafted & seen.unmasked & same
    return accepted, drafted & ~accepted


def _frame(
    step: SampleStep, start: int, tokens: list[int], *, plan: StepPlan | None = None, positions: list[int]
) -> Frame:
    return Frame(
        kind=step.kind,
        start=start,
        tokens=tokens,
        rows=step.rows,
        hidden=describe(plan.hidden if plan else NO_POSITIONS),
        sub_block=describe(NO_POSITIONS),
        changed=describe(NO_POSITIONS),
        proposals=[],
        unmasked=describe(NO_POSITIONS),
        accepted=describe(NO_POSITIONS),
        rejected=describe(NO_POSITIONS),
        branches=[],
        layers=_layers(plan) if plan else [],
        positions=positions,
        totals=_NO_TOTALS,
    )


def _layers(plan: StepPlan) -> list[ShownLayers]:
    return [
        ShownLayers(first, last, describe(plan.carried(last - 1)), *map(describe, rows))
        for first, last, rows in plan.runs
    ]


def _totals(steps: Iterator[tuple[SampleStep, int]]) -> Iterator[Totals]:
    total = _NO_TOTALS
    for step, tokens in steps:
        total = Totals(
            tokens=tokens,
            forwards=total["forwards"] + bool(step.rows),
            attention_run=total["attention_run"] + step.attention_run,
            attention_reused=total["attention_reused"] + step.attention_reused,
            mlp_run=total["mlp_run"] + step.mlp_run,
            mlp_reused=total["mlp_reused"] + step.mlp_reused,
        )
        yield total


_NO_TOTALS = Totals(tokens=0, forwards=0, attention_run=0, attention_reused=0, mlp_run=0, mlp_reused=0)


def first_difference(prompt: Sequence[int], runs: Sequence[Run]) -> Difference | None:
    """Returns where two runs first differ, in the order of decoding: later rows may be unmasked before earlier ones."""
    if len(runs) < 2:
        return None
    one, other = (run["ids"] for run in runs)
    length = max(len(one), len(other))
    apart = {len(prompt) + index for index in range(length) if one[index : index + 1] != other[index : index + 1]}
    return min(
        (
            Difference(position=position, frame=index)
            for run in runs
            for index, frame in enumerate(run["frames"])
            for position in frame["positions"]
            if position in apart
        ),
        key=lambda each: (each["frame"], each["position"]),
        default=None,
    )


def trace_document(
    model: str, prompts: Sequence[Sequence[int]], engines: Sequence[Engine], runs: Sequence[Sequence[Run]], text: Text
) -> TraceDocument:
    """`runs` holds, per engine, the runs of all prompts in their order."""
    first = engines[0]
    samples = [
        TracedSample(prompt=list(prompt), runs=list(each), difference=first_difference(prompt, each))
        for prompt, *each in zip(prompts, *runs, strict=True)
    ]
    return TraceDocument(
        model=model,
        layers=first.model.config.layers,
        block_size=first.decoding.block_size,
        mask_id=first.decoding.mask_id,
        policy=first.decoder.description,
        engines=list(map(_title, engines)),
        texts={token: text(token) for token in sorted(set(_tokens(samples, first.decoding.mask_id)))},
        samples=samples,
    )


def _title(engine: Engine) -> str:
    """Its rules; the decoder where it takes none."""
    rules = ", ".join(map(registry.describe, engine.decoder.rules))
    return rules or (engine.decoder.text if engine.decoder.policy is None else "no reuse")


def _tokens(samples: Sequence[TracedSample], mask_id: int) -> Iterator[int]:
    """Yields every token but the mask, which has no text if the model's tokenizer does not know it."""
    for sample in samples:
        yield from sample["prompt"]
        for run in sample["runs"]:
            yield from run["ids"]
            for frame in run["frames"]:
                yield from (token for token in frame["tokens"] if token != mask_id)
                yield from (proposal.token for proposal in frame["proposals"])
                yield from (token for branch in frame["branches"] for token in branch["tokens"])
