"""What this machine can do at best, measured: how fast it reads and multiplies, and how close a step comes to that."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from stepsaver.engine.cost import Work, record_work
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.trace import ForwardRecord, Trace

READ = 1 << 27  # numbers: more than any cache holds
MULTIPLIED, MULTIPLIED_ELSEWHERE = 1024, 8192  # rows, inputs and outputs: on a CPU, and on a device with more units
TIMES = 7  # repeats, of which the best counts: a limit is what is possible
KINDS = ("prefill", "full", "sub", "commit")
AnyTrace = TypeVar("AnyTrace", bound=Trace)


class Machine(NamedTuple):
    """What a machine can do at best."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """The time of its operations or of reading its weights and caches, whichever is longer."""
        return max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)


def measure_machine(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """Measures a device; a CPU with as many threads as torch uses. What is read is float32: only the bytes count."""
    device = torch.device(device)
    numbers = torch.ones(READ, device=device)
    size = MULTIPLIED if device.type == "cpu" else MULTIPLIED_ELSEWHERE
    square = torch.rand(size, size, device=device).to(dtype)
    reading = _best(numbers.sum, device)
    multiplying = _best(lambda: F.linear(square, square), device)
    return Machine(flops_per_s=2 * size**3 / multiplying, bytes_per_s=numbers.nbytes / reading)


def _best(action: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(TIMES):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken)


@dataclass(frozen=True)
class StepTime:
    """Medians of the forwards in which every sample took a step of one kind."""

    milliseconds: float
    limit_milliseconds: float  # by reading or by multiplying, whichever takes longer
    limited_by: str

    @property
    def share(self) -> float:
        return self.limit_milliseconds / self.milliseconds


def step_times(model: Transformer, traces: Iterable[Trace], machine: Machine) -> dict[str, StepTime]:
    """Returns the times by kind of step, for the kinds that the traces have."""
    of_kind: dict[str, list[ForwardRecord]] = {kind: [] for kind in KINDS}
    for record in (record for trace in traces for record in trace.records):
        kinds = {entry.kind for entry in record.entries}
        if len(kinds) == 1 and (kind := kinds.pop()) in of_kind:
            of_kind[kind].append(record)
    return {kind: _step_time(model, records, machine) for kind, records in of_kind.items() if records}


def _step_time(model: Transformer, records: list[ForwardRecord], machine: Machine) -> StepTime:
    work = [record_work(model.config, each, model.dtype.itemsize, model.bytes_per_weight) for each in records]
    reading = median(each.bytes / machine.bytes_per_s for each in work)
    multiplying = median(each.flops / machine.flops_per_s for each in work)
    return StepTime(
        milliseconds=1000 * median(record.seconds for record in records),
        limit_milliseconds=1000 * median(machine.seconds(each) for each in work),
        limited_by="reading" if reading > multiplying else "multiplying",
    )


def random_prompts(model: Transformer, lengths: list[int], limits: list[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, model.config.vocab, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(tuple(each), max_new_tokens=limit) for each, limit in zip(ids, limits, strict=True)]


def decode_once(engine: Engine, prompts: list[Prompt], trace: AnyTrace) -> AnyTrace:
    """Decodes the prompts, fills the trace and returns it."""
    for _ in engine.generate(prompts, max_new_tokens=0, trace=trace):
        pass
    return trace
