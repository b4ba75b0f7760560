"""What a forward costs on one machine: seconds by positions and context, measured, and read between the points.

Whoever decides by cost reads a `Curve`: which forwards are joined, how many positions a draft has, what speed-up a run
should show.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepsaver.engine.batch import BatchContext, execute
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import DecodingSettings, resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory
from stepsaver.engine.machine import device_name
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.state import Request, Sample, new_block, request_key

CONTEXTS = (0, 128, 384)  # tokens before a sample's positions
OF_A_SAMPLE = 64  # the most positions of one sample that are measured, at batch size 1
MOST = 1024  # and of a batch
SECONDS, LEAST_ROUNDS = 2.0, 3  # a round is a forward per point; one more warms up


@dataclass(frozen=True)
class Curve:
    """Seconds of a forward, with planning and the choice of tokens, where `batch_size` samples share its positions."""

    device: str
    dtype: str
    threads: int
    shape: str  # of the model, and how its weights are kept
    batch_size: int
    positions: tuple[int, ...]  # of all samples together, ascending
    contexts: tuple[int, ...]  # of each sample, ascending
    table: tuple[tuple[float, ...], ...]  # for each context, the seconds by positions

    def __post_init__(self) -> None:
        """Refuses values that are no curve: it may be read from a file."""
        names = (self.device, self.dtype, self.shape)
        counts = (self.threads, self.batch_size, *self.positions, *self.contexts)
        seconds = np.array(self.table, dtype=np.float64)
        if not all(isinstance(each, str) for each in names) or not all(type(each) is int for each in counts):
            raise ValueError("names are text and counts whole numbers")
        if not (_rises(self.positions, 1) and len(self.positions) > 1 and _rises(self.contexts, 0)):
            raise ValueError("positions and contexts ascend, and there are at least two and one of them")
        if seconds.shape != (len(self.contexts), len(self.positions)):
            raise ValueError("the table has a line per context, with a number for each of the positions")
        if not (np.isfinite(seconds).all() and (seconds > 0).all() and _never_falls(seconds)):
            raise ValueError("seconds are positive, and more positions or context never take less")

    def seconds(self, positions: float, context: float) -> float:
        """Between the points on the line through them; beyond the last two on their line."""
        by_context = [_on_line(positions, self.positions, seconds) for seconds in self.table]
        return _on_line(context, self.contexts, by_context)

    def is_of(self, model: Transformer, batch_size: int) -> bool:
        """Whether it was measured here, with this model and batch size."""
        return (self.device, self.dtype, self.threads, self.shape, self.batch_size) == (*_here(model), batch_size)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "Curve":
        """Raises ValueError, KeyError or TypeError for what is no curve."""
        values = {field.name: content[field.name] for field in fields(cls)}
        values |= {name: tuple(values[name]) for name in ("positions", "contexts")}
        return cls(**values | {"table": tuple(tuple(map(float, line)) for line in values["table"])})


def read_curve(path: Path) -> Curve:
    """Raises UsageError for a file that is damaged, and OSError for one that cannot be read."""
    try:
        return Curve.from_json(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise UsageError(f"{path} is no curve of what forwards cost ({type(error).__name__}: {why})") from None


def _rises(values: Sequence[int], least: int) -> bool:
    return all(one < other for one, other in zip((least - 1, *values), values, strict=False)) and bool(values)


def _never_falls(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    return all((np.diff(seconds, axis=axis) >= 0).all() for axis in (0, 1))


def _on_line(at: float, points: Sequence[int], values: Sequence[float]) -> float:
    if at <= points[-1] or len(points) == 1:
        return float(np.interp(at, points, values))
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return values[-1] + slope * (at - points[-1])


def measure_curve(
    model: Transformer,
    *,
    decoding: DecodingSettings | None = None,
    batch_size: int = 1,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Curve:
    """Times forwards on scratch caches, within two seconds or five forwards a point, whichever is longer.

    Points are measured in turn, there and back. Of each the lower quartile counts, because a disturbance only adds
    time, and where more positions or context seem to take less, the table is evened out.
    """
    started = perf_counter()
    decoding = decoding or resolve_decoding(model.config)
    most = min(max(batch_size * decoding.block_size, OF_A_SAMPLE), MOST)
    counts = [1 << power for power in range(most.bit_length())]
    contexts = [each for each in CONTEXTS if each + OF_A_SAMPLE <= model.config.max_positions] or [0]
    scratch = Scratch(model, decoding, slots=min(batch_size, most), context=contexts[-1], positions=most)
    points = [(context, count) for context in contexts for count in counts]
    taken: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for context, count in points:
        scratch.seconds(count, context)  # warm-up
    rounds, begun = 0, perf_counter()
    while rounds < LEAST_ROUNDS or (perf_counter() - begun) * (1 + 1 / rounds) < SECONDS:
        for context, count in points if rounds % 2 else reversed(points):
            taken[context, count].append(scratch.seconds(count, context))
        rounds += 1
    quartiles = [[float(np.quantile(taken[context, count], 0.25)) for count in counts] for context in contexts]
    curve = Curve(*_here(model), batch_size, tuple(counts), tuple(contexts), _evened_out(quartiles))
    say(f"note: measured what a forward costs here, in {perf_counter() - started:.1f} s")
    return curve


_CURVES: "WeakKeyDictionary[Transformer, dict[int, Curve]]" = WeakKeyDictionary()


def curve_of(model: Transformer, decoding: DecodingSettings, batch_size: int) -> Curve:
    """The curve of a loaded model, measured when it is first asked for."""
    curves = _CURVES.setdefault(model, {})
    if batch_size not in curves:
        curves[batch_size] = measure_curve(model, decoding=decoding, batch_size=batch_size)
    return curves[batch_size]


def _here(model: Transformer) -> tuple[str, str, int, str]:
    """Device, dtype, threads and shape."""
    config = model.config
    heads = f"{config.heads} heads ({config.kv_heads}) of {config.head_dim}"
    network = f"{config.layers} layers of {config.hidden}, {heads}, mlp {config.mlp}, vocabulary {config.vocab}"
    shape = f"{network}, weights of {8 * model.bytes_per_weight:.3g} bits"
    return device_name(model.device), str(model.dtype).removeprefix("torch."), torch.get_num_threads(), shape


def _evened_out(table: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    """Halfway between the most so far and the least from here on, along both axes: neither ever falls."""
    seconds = np.array(table)
    for axis in (0, 1):
        least = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)
        seconds = (np.maximum.accumulate(seconds, axis) + least) / 2
    return tuple(tuple(line) for line in seconds.tolist())


class Scratch:
    """Samples without a text, whose forwards read and write caches that nobody else uses."""

    def __init__(
        self, model: Transformer, decoding: DecodingSettings, *, slots: int, context: int, positions: int
    ) -> None:
        capacity = context + math.ceil(positions / slots)
        cache = KeyValueCache(
            model.config,
            slots=slots,
            capacity=capacity,
            dtype=model.dtype,
            device=model.device,
            backend=model.backend,
        )
        cache.stored.zero_()  # memory that nobody has written is all the same page, and may hold NaN
        self.decoding = replace(decoding, prefix_cache=True, block_cache=True, join="off", stop_ids=())
        memory = Memory(cache, None, model.rotations(capacity))
        self.batch = BatchContext(model, memory, Denoise(Fixed()), self.decoding, Sampling(), slots)

    def seconds(self, positions: int, context: int) -> float:
        """The seconds of an iteration: one forward, in which as many samples as there are share the positions."""
        slots = min(self.batch.slots, positions)
        size = positions // slots
        batch = replace(self.batch, decoding=replace(self.decoding, block_size=size, sub_block_size=size))
        request = Request((0,) * context, size, request_key((), None))
        opening = (0,) if self.decoding.prediction.opens_blocks else ()
        samples = []
        for slot in range(slots):
            block = new_block(context, opening, decoding=batch.decoding, layers=None)
            samples.append(Sample(slot, request, slot, context=list(request.prompt), block=block))
        started = perf_counter()
        scheduled = [step for sample in samples for step in batch.decoder.next_steps(batch, sample)]
        execution = execute(batch, scheduled)
        for step, proposals in zip(execution.steps, execution.proposals, strict=True):
            batch.decoder.postprocess(batch, [step], [proposals])
        return perf_counter() - started
