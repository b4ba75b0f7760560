"""What a user may choose from, and what holds if nothing is chosen.

Only `typing` is imported here, so that `--help` can quote all of it without waiting for torch.
"""

from typing import Literal, get_args

# How weights are kept for float32 arithmetic on a CPU. auto: in 16 bits if they are large and float16 holds them;
# float16: all in 16 bits, or an error; float32: none in 16 bits.
Weights = Literal["auto", "float32", "float16"]
KINDS_OF_WEIGHTS: tuple[Weights, ...] = get_args(Weights)

# Whether steps share forwards: a prompt's end with the first step, a commit with the next block's. Same tokens.
# auto: commits only where a forward costs more than the step that a wrong guess repeats.
Join = Literal["auto", "on", "off"]
JOINS: tuple[Join, ...] = get_args(Join)

# Whether a GPU runs small functions that torch compiles, between its products and attention. auto: where `doctor`
# has found them equal on this card.
Compile = Literal["auto", "on", "off"]
COMPILES: tuple[Compile, ...] = get_args(Compile)

# How a log-likelihood is estimated: by the decode loop, or by one forward.
Estimator = Literal["trajectory", "reference", "autoregressive"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

DECODE = "block"  # block diffusion
DEFAULT_POLICY = "threshold"
THRESHOLD = 0.9  # of the decode policy, as published for Fast-dLLM v2
BATCH_SIZE = 1
WEIGHTS: Weights = "auto"
COMPILE: Compile = "auto"
NEW_TOKENS = 256  # the harness's own limit
