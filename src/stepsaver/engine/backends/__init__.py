"""What runs the operations of a layer: a folder per kind of device, behind the few calls of `Backend`.

`forward.py` knows none of them. Another backend is a folder with a subclass of `Backend`, and a line here.
"""

import torch

from stepsaver.engine.backends.backend import TORCH, Backend
from stepsaver.engine.backends.cpu.backend import CPU
from stepsaver.engine.backends.gpu.backend import GPU

__all__ = ["TORCH", "Backend", "backend_for"]


def backend_for(dtype: torch.dtype, device: torch.device) -> Backend:
    """The backend for arithmetic of a precision on a device; torch's own operations serve wherever there is none."""
    if device.type != "cpu":
        return GPU
    return CPU if dtype == torch.float32 else TORCH
