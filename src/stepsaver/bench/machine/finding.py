"""What `stepsaver doctor` finds of a machine or a checkpoint. Imports nothing slow, for `--help`."""

from typing import NamedTuple


class Finding(NamedTuple):
    name: str
    is_fine: bool
    says: str
