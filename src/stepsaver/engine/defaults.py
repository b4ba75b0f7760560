"""Defaults for what a user leaves open, on the command line, in `experiment.yaml` and in lm-eval's arguments.

Only `typing` is imported here, so that `--help` can quote them without waiting for torch.
"""

from typing import Literal, get_args

# How weights are kept for float32 arithmetic on a CPU. auto: in 16 bits if they are large and float16 holds them;
# float16: all in 16 bits, or an error; float32: none in 16 bits.
Weights = Literal["auto", "float32", "float16"]
KINDS_OF_WEIGHTS: tuple[Weights, ...] = get_args(Weights)

DECODE = "block"  # block diffusion
THRESHOLD = 0.9  # of the decode policy, as published for Fast-dLLM v2
BATCH_SIZE = 1
WEIGHTS: Weights = "auto"
NEW_TOKENS = 256  # the harness's own limit
