"""Devices that we do not have: what their data sheets say, and what rows of a model of some shape would cost there.

A part of a layer takes as long as reading its weights, multiplying its rows, or launching its operations, whichever is
longest. None of it was measured; a profile says where its numbers are from.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.row_costs import Curve, RowCosts

FOLDER = Path(__file__).parent / "devices"
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ROWS = tuple(1 << power for power in range(13))

# Assumptions that no data sheet holds, the same for every device.
READ_SHARE, MULTIPLY_SHARE = 0.8, 0.6  # of the peaks, that well-made kernels reach
LAUNCH_SECONDS = 6e-6  # for one operation in PyTorch's eager mode, on the host
ATTENTION_LAUNCHES, MLP_LAUNCHES, OTHER_LAUNCHES = 11, 6, 30  # as tests/engine/test_stand_in_device.py counts them
TICK_SECONDS, SAMPLE_SECONDS, RULE_SECONDS = 200e-6, 60e-6, 3e-6  # planning on a host like the one of 05 and 06


@dataclass(frozen=True)
class DeviceProfile:
    """Peaks as the maker states them."""

    name: str
    source: str
    memory_gb: float
    read_gb_per_s: float
    tflops: dict[str, float]  # by dtype

    @property
    def dtype(self) -> str:
        """The dtype that `auto` means on the device."""
        return "bfloat16" if "bfloat16" in self.tflops else "float16"

    def holds(self, config: ModelConfig) -> bool:
        """Whether the weights fit, with a tenth to spare for caches and hidden states."""
        layer = _attention_numbers(config) + _mlp_numbers(config)
        numbers = config.layers * layer + (1 if config.tied else 2) * config.vocab * config.hidden
        return 1.1 * numbers * BYTES[self.dtype] < 1e9 * self.memory_gb

    def row_costs(self, config: ModelConfig) -> RowCosts:
        kv_width = config.kv_heads * config.head_dim
        query_width = config.heads * config.head_dim
        return RowCosts(
            device=self.name,
            dtype=self.dtype,
            weights=f"{8 * BYTES[self.dtype]} bits",
            threads=1,
            shape="projected",
            layers=config.layers,
            keys_values_share=config.kv_heads / (config.heads + config.kv_heads),
            rows=ROWS,
            forward=(OTHER_LAUNCHES * LAUNCH_SECONDS,) * len(ROWS),
            attention=self._curve(_attention_numbers(config), ATTENTION_LAUNCHES),
            mlp=self._curve(_mlp_numbers(config), MLP_LAUNCHES),
            head=self._curve(config.hidden * config.vocab, 1),
            context_row=self._multiplying(4 * query_width),
            tick=TICK_SECONDS,
            sample=SAMPLE_SECONDS,
            rule=RULE_SECONDS,
            step=0.0,
            measuring=0.0,
            cached_row=self._reading(2 * kv_width * BYTES[self.dtype]),
        )

    def _curve(self, numbers: int, launches: int) -> Curve:
        reading = self._reading(numbers * BYTES[self.dtype])
        return tuple(max(reading, self._multiplying(2 * rows * numbers), launches * LAUNCH_SECONDS) for rows in ROWS)

    def _reading(self, count: float) -> float:
        return count / (READ_SHARE * 1e9 * self.read_gb_per_s)

    def _multiplying(self, flops: float) -> float:
        return flops / (MULTIPLY_SHARE * 1e12 * self.tflops[self.dtype])


def _attention_numbers(config: ModelConfig) -> int:
    return config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)


def _mlp_numbers(config: ModelConfig) -> int:
    return 3 * config.hidden * config.mlp


def device_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def device_profile(name: str) -> DeviceProfile:
    if name not in device_names():
        raise unknown_name("device", name, device_names())
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    profile = DeviceProfile(**content)
    if profile.dtype not in profile.tflops:
        raise UsageError(f"{FOLDER / name}.yaml has no tflops of {profile.dtype}")
    return profile
