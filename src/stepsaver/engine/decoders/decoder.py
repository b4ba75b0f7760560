"""The contract of a decoder: how a sample's text is written, forward by forward."""

from abc import ABC, abstractmethod
from typing import ClassVar

from stepsaver.engine import registry
from stepsaver.engine.batch import BatchContext, Outcome, ScheduledStep
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Ending, Request, Sample, ending_of, new_block


class Decoder(ABC):
    """A frozen dataclass; its fields are its settings and identify it. It keeps no state: samples do."""

    name: ClassVar[str]
    purpose: ClassVar[str]  # what it is for, in a line
    has_blocks: ClassVar[bool] = True
    asks_after_every_token: ClassVar[bool] = True  # whether `finished` is asked after every token, or after every block

    @property
    def text(self) -> str:
        """As `--decode` reads it."""
        return registry.describe(self)

    @property
    def policy(self) -> Policy | None:
        """Which positions a step unmasks; None: there are no denoising steps to choose for."""
        return None

    @property
    def rules(self) -> tuple[Rule, ...]:
        return ()

    @property
    def description(self) -> str:
        """For people: the policy, where there is one."""
        return self.text if self.policy is None else registry.describe(self.policy)

    @property
    def needs_curve(self) -> bool:
        """Whether it decides by what a forward costs."""
        return False

    def settled(self, decoding: DecodingSettings) -> DecodingSettings:
        """The settings that this decoder works with."""
        return decoding

    def check(self, decoding: DecodingSettings, layers: int) -> None:  # noqa: B027 (some decoders fit every model)
        """Refuses decoding settings and models that this decoder cannot work with."""

    def estimator(self, wanted: Estimator, decoding: DecodingSettings) -> Estimator:
        """The estimator that scores what is `wanted`: `trajectory` is how likely this decoder writes a text."""
        return wanted

    def context_block_size(self, decoding: DecodingSettings) -> int:
        """A position of the context sees up to the end of its block of this size."""
        return 1 if decoding.prediction.has_causal_context else decoding.block_size

    def further_places(self, decoding: DecodingSettings) -> int:
        """How many places behind its text a sample needs in its slot."""
        return 0

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        """A sample with its slot. The prompt's whole blocks are context, and the rest opens the first block. A causal
        context is the whole prompt.
        """
        size = 1 if batch.decoding.prediction.has_causal_context else batch.decoding.block_size
        whole = len(request.prompt) // size * size
        block = fresh_block(batch, request, whole, request.prompt[whole:])
        sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
        sample.ending = ending_of(sample, batch.decoding.stop_ids)
        return sample

    def open(self, batch: BatchContext, sample: Sample, proposed: Proposals) -> None:
        """Starts the block after the context, with the token that was predicted for it, if one was."""
        start = len(sample.context)
        sample.confidences.update(enumerate(proposed.confidence.tolist(), start))
        self.begin_block(batch, sample, tuple(sample.request.writer.write(start, *each) for each in proposed.each()))

    def begin_block(self, batch: BatchContext, sample: Sample, given: tuple[int, ...]) -> None:
        sample.block = fresh_block(batch, sample.request, len(sample.context), given)
        self.end_if_over(batch, sample, new=len(given))

    def commit(self, batch: BatchContext, step: ScheduledStep, proposed: Proposals) -> Outcome:
        """Makes a committed block part of the context, and opens the next one."""
        step.sample.context += step.block.tokens.tolist()
        self.open(batch, step.sample, proposed)
        return Outcome(unmasked=len(proposed.tokens))

    def end_if_over(self, batch: BatchContext, sample: Sample, *, new: int) -> None:
        """Ends the sample at a stop token, at its limit, or where `finished` says so. `new` tokens of its block have
        just become known.
        """
        block = sample.block
        sample.ending = ending_of(sample, batch.decoding.stop_ids)
        if batch.finished is None or not new or not (self.asks_after_every_token or not block.masked):
            return
        ids, last = sample.generated, block.start + block.known - len(sample.request.prompt)
        first = last - new + 1 if self.asks_after_every_token else last
        for count in range(max(first, 1), last + 1 if sample.ending is None else len(ids)):
            if batch.finished(ids[:count]):
                sample.ending = Ending("stop", len(sample.request.prompt) + count)
                return

    @abstractmethod
    def next_steps(self, batch: BatchContext, sample: Sample) -> list[ScheduledStep]:
        """What the sample does in the next forward."""

    @abstractmethod
    def postprocess(self, batch: BatchContext, run: list[ScheduledStep], proposals: list[Proposals]) -> list[Outcome]:
        """Acts on the proposals of the sample's steps. Returns one outcome per step."""


def fresh_block(batch: BatchContext, request: Request, start: int, given: tuple[int, ...]) -> BlockState:
    layers = batch.model.config.layers if batch.keeps_layer_history else None
    return new_block(start, given, decoding=batch.decoding, layers=layers, last=request.writer.last)
