"""What holds where a user says nothing: on the command line, in `experiment.yaml` and in lm-eval's arguments alike.

Nothing is imported here, so that `--help` can quote the numbers without waiting for torch.
"""

THRESHOLD = 0.9  # of the decode policy: the published one of Fast-dLLM v2
BATCH_SIZE = 1
NEW_TOKENS = 256  # the harness's own limit
