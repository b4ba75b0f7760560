"""What holds where a user says nothing: on the command line, in `experiment.yaml` and in lm-eval's arguments alike.

Nothing but a type is imported here, so that `--help` can quote them without waiting for torch.
"""

from typing import Literal, get_args

# How weights are kept for float32 arithmetic on a CPU. auto: in 16 bits where float16 holds them and they are large;
# float16: all of them, or an error; float32: none.
Weights = Literal["auto", "float32", "float16"]
KINDS_OF_WEIGHTS: tuple[Weights, ...] = get_args(Weights)

THRESHOLD = 0.9  # of the decode policy: the published one of Fast-dLLM v2
BATCH_SIZE = 1
WEIGHTS: Weights = "auto"
NEW_TOKENS = 256  # the harness's own limit
