"""How far a counted share may be from the true one."""

from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

CONFIDENCE = 0.95


class Bounds(NamedTuple):
    low: float
    high: float


def wilson_interval(right: int, count: int) -> Bounds:
    """The 95 % interval of a share (Wilson, 1927)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, more = right / count, z * z / count
    centre = (share + more / 2) / (1 + more)
    half = sqrt(z * z * share * (1 - share) / count + more * more / 4) / (1 + more)
    return Bounds(max(centre - half, 0.0), min(centre + half, 1.0))
