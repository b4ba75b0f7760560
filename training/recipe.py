"""Every number of the training in one place. The defaults made the checkpoint that ships with the package."""

import math
import os
from dataclasses import dataclass
from typing import Literal

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.config import FIELDS, MOST_BLOCK_ROWS, ModelConfig
from stepsaver.engine.models.fields import Field, Real, Whole
from stepsaver.engine.models.rope import Rope
from training.problems.questions import LARGEST_ADDEND, SMALLEST_ADDEND
from training.problems.word_problems import EASY, HARD, SINGLE_DIGITS, Difficulty

Stage = Literal["autoregressive", "joint"]

STEP, SHARE, WEIGHT = Whole(0, 1 << 30), Real(-1e-9, 1), Real(-1e-9, 1e6)
RATE = Real(0, 10)
# The allowed range of every number of a recipe.
RANGES: dict[str, Field] = {
    "seed": Whole(-(1 << 63), (1 << 63) - 1),
    "threads": Whole(1, max(2, os.cpu_count() or 1)),
    "layers": FIELDS["num_hidden_layers"],
    "hidden": Whole(2, 1 << 14),
    "heads": Whole(1, 1 << 10),
    "mlp": Whole(1, 1 << 16),
    "block_size": Whole(2, MOST_BLOCK_ROWS),
    "sub_block_size": Whole(1, MOST_BLOCK_ROWS),
    "rope_theta": FIELDS["rope_theta"],
    "max_positions": FIELDS["max_position_embeddings"],
    "initial_deviation": Real(0, 100),
    **dict.fromkeys(("autoregressive_steps", "joint_steps", "early_steps"), STEP),
    **dict.fromkeys(("decay_start", "hard_start"), STEP),
    **dict.fromkeys(("warm_up_steps", "decay_steps", "finish_steps", "save_every", "check_every"), Whole(1, 1 << 30)),
    **dict.fromkeys(("autoregressive_units", "joint_units"), Whole(1, 1024)),
    "variants": Whole(1, 64),
    "early_largest_addend": Whole(SMALLEST_ADDEND, 99),
    "final_rate": RATE,
    "weight_decay": SHARE,
    "clip_norm": Real(0, 1e6),
    **dict.fromkeys(("autoregressive_word_problem_share", "joint_word_problem_share"), SHARE),
    **dict.fromkeys(("hard_word_problem_share", "complementary_share"), SHARE),
    **dict.fromkeys(("short_weight", "later_weight", "complementary_weight", "padding_weight"), WEIGHT),
}


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    threads: int = 2

    layers: int = 28
    hidden: int = 96
    heads: int = 6
    mlp: int = 256
    block_size: int = 32
    sub_block_size: int = 8
    rope_theta: float = 10000.0
    max_positions: int = 4096
    initial_deviation: float = 0.06

    autoregressive_steps: int = 2000
    joint_steps: int = 2600
    autoregressive_units: int = 40  # blocks of rows in a step of the first stage
    joint_units: int = 96
    rates: tuple[tuple[int, float], ...] = (
        (0, 2e-3),
        (500, 7e-4),
        (700, 1.5e-3),
        (2000, 1.2e-3),
        (3300, 1e-3),
    )  # each from a step on
    final_rate: float = 2e-5
    warm_up_steps: int = 100
    decay_start: int = 3000  # of a cosine that would reach the final rate after `decay_steps`
    decay_steps: int = 1000
    hard_start: int = 3300  # from this step on the word problems are as hard as the test's, and that cosine has ended
    finish_steps: int = 400  # the last ones, over which the rate falls linearly
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.97)
    clip_norm: float = 1.0

    autoregressive_word_problem_share: float = 0.5  # of the problems; the other two tasks share the rest equally
    joint_word_problem_share: float = 0.35
    hard_word_problem_share: float = 0.5
    short_weight: float = 2.0  # of the answers of the other two tasks, which have a fifth of the tokens
    early_steps: int = 900  # with addends up to `early_largest_addend`; then easy problems until `hard_start`
    early_largest_addend: int = 9
    variants: int = 3  # noisy copies of an answer's block with masks as in decoding
    complementary_share: float = 0.35  # of the answer blocks that also get a pair of complementary random masks
    later_weight: float = 0.1  # of masked rows after the sub-block being decoded
    complementary_weight: float = 0.5
    padding_weight: float = 0.1  # of the rows after the stop token, multiplied with the weights above

    save_every: int = 100
    check_every: int = 100

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            if not allowed.holds(getattr(self, name)):
                raise UsageError(f"{name} {shown(getattr(self, name))} is not {allowed.means}")
        if self.hidden % (2 * self.heads):
            raise UsageError(f"{self.hidden} columns cannot be divided into {self.heads} heads of an even number each")
        if self.block_size % self.sub_block_size:
            raise UsageError(f"sub-block size {self.sub_block_size} does not divide the block size {self.block_size}")
        starts = [start for start, _ in self.rates]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise UsageError(f"rates {shown(self.rates)}: the first is for step 0, each further one for a later step")
        wrong = next((rate for _, rate in self.rates if not RATE.holds(rate)), None)
        if wrong is not None:
            raise UsageError(f"rates: {shown(wrong)} is not {RATE.means}")

    @property
    def steps(self) -> int:
        return self.autoregressive_steps + self.joint_steps

    def stage(self, step: int) -> Stage:
        return "autoregressive" if step < self.autoregressive_steps else "joint"

    def units(self, stage: Stage) -> int:
        return self.autoregressive_units if stage == "autoregressive" else self.joint_units

    def word_problem_share(self, step: int) -> float:
        if step >= self.hard_start:
            return self.hard_word_problem_share
        if self.stage(step) == "joint":
            return self.joint_word_problem_share
        return self.autoregressive_word_problem_share

    def difficulty(self, step: int) -> Difficulty:
        """Returns the difficulty of the word problems: a curriculum that ends with the difficulty of the test."""
        if step >= self.hard_start:
            return HARD
        return SINGLE_DIGITS if step < self.early_steps else EASY

    def largest_addend(self, step: int) -> int:
        """Returns the largest addend of the arithmetic questions."""
        return self.early_largest_addend if step < self.early_steps else LARGEST_ADDEND

    def rate(self, step: int) -> float:
        """Warm-up, constant rates from given steps on, a cosine until the hard problems, a linear fall at the end.

        Only the fall depends on the number of steps to come, so a training can be made longer or shorter from any
        checkpoint before the fall, and then equals one that was planned that way.
        """
        rate = [rate for start, rate in self.rates if start <= step][-1] * min(1.0, (step + 1) / self.warm_up_steps)
        progress = min(1.0, max(0.0, (step - self.decay_start) / self.decay_steps)) if step < self.hard_start else 0.0
        decayed = self.final_rate + (rate - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2
        return decayed * min(1.0, (self.steps - step) / self.finish_steps)

    def model_config(self, *, vocab: int, mask_id: int, stop_id: int) -> ModelConfig:
        return ModelConfig(
            architecture="Fast_dLLM_QwenForCausalLM",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            mlp=self.mlp,
            vocab=vocab,
            rope=Rope(theta=self.rope_theta),
            max_positions=self.max_positions,
            tied=True,
            qkv_bias=True,
            block_size=self.block_size,
            mask_id=mask_id,
            stop_ids=(stop_id,),
        )
