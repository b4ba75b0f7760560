"""Suffix dropout: masked positions far after the sub-block are hidden until their turn."""

from dataclasses import dataclass, field
from typing import ClassVar

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import positions_between
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class SuffixDropout(Rule):
    """A step is that of a block which ends `ahead` positions after the current sub-block.

    Source: suffix dropout in whole-sequence diffusion (DPad, Chen et al., 2025; Window-Diffusion, 2026), here inside a
    block. The masked positions after that are neither computed nor attended to until their sub-block comes. They have
    never been computed then, so they count as changed positions. Inexact: a position no longer sees how many masks
    follow it.
    """

    name: ClassVar[str] = "suffix_dropout"
    purpose: ClassVar[str] = "leave out the masked positions after the sub-block, in attention too, until their turn"
    needs_block_cache: ClassVar[bool] = False

    ahead: int = field(default=0, metadata=tuned(8, 4, 0))

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise UsageError(f"rule suffix_dropout: ahead {self.ahead} is negative")

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        if decoding.sub_block_size + self.ahead >= decoding.block_size:
            raise UsageError(
                f"rule suffix_dropout: sub-blocks of {decoding.sub_block_size} positions and {self.ahead} ahead "
                f"leave none of the block's {decoding.block_size} out"
            )

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        end = min(view.sub_block.bit_length() + self.ahead, view.block_size)
        return plan.hiding(positions_between(end, view.block_size))
