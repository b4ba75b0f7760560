"""What `stepsaver doctor` finds out about a machine or a checkpoint. Imports nothing slow: `--help` loads it."""

from typing import NamedTuple


class Finding(NamedTuple):
    name: str
    is_fine: bool
    says: str
