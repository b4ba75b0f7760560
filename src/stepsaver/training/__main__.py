"""`python -m stepsaver.training`: trains the embedded model, resumes a training, exports a checkpoint."""

import sys

from stepsaver.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
