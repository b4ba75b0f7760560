"""The speed of the engine on this machine, with random weights of realistic shapes and a fixed number of steps.

Every figure is a median of repeats that are interleaved with what they are compared with, in one process.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.bare import BareModel, forward_shape
from stepsaver.bench.limit import Machine, decode_once, random_prompts, step_times
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.engine.trace import COMPUTED_STEPS, ForwardRecord, Trace

RULES = ("suffix_dropout:ahead=0", "partial_commit:settle=1")  # the rules that are measured


@dataclass(frozen=True)
class Workload:
    """Prompts of random ids, all of the same length, and how far they are decoded."""

    batch: int
    prompt_tokens: int = 64
    new_tokens: int = 64
    rows_per_step: int = 2


@dataclass(frozen=True)
class Spread:
    """The median of repeats, and the smallest and largest of them."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3g} [{self.low:.3g}, {self.high:.3g}]"


def spread(values: list[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def fixed_engine(model: Transformer, *, batch: int, rows_per_step: int, rules: tuple[Rule, ...] = ()) -> Engine:
    """Returns an engine that never stops before its limit and unmasks a fixed number of rows: its steps are known."""
    decoding = resolve_decoding(model.config, stop_ids=())
    return Engine(model, decoder=Denoise(Fixed(rows_per_step), rules), batch_size=batch, decoding=decoding)


@dataclass
class PairedTrace(Trace):
    """Runs the bare multiplications of the same shape after every forward: both find the machine in the same state."""

    bare: BareModel = field(kw_only=True)
    bare_seconds: list[float] = field(default_factory=list)

    def add(self, record: ForwardRecord) -> None:
        super().add(record)
        self.bare_seconds.append(self.bare.seconds(forward_shape(record)))

    @property
    def efficiency(self) -> float:
        return sum(self.bare_seconds) / self.decode_seconds


def measure_efficiency(
    model: Transformer, bare: BareModel, machine: Machine, workload: Workload, repeats: int
) -> dict[str, Any]:
    """Measures tokens/s and forwards/s, the share of the decode's time that its bare multiplications take, and how
    close each kind of step comes to the machine's limit; without rules and with them, in turn.
    """
    rules = tuple(map(parse_rule, RULES))
    engine = fixed_engine(model, batch=workload.batch, rows_per_step=workload.rows_per_step)
    ruled = fixed_engine(model, batch=workload.batch, rows_per_step=workload.rows_per_step, rules=rules)
    count = workload.batch
    prompts = random_prompts(model, [workload.prompt_tokens] * count, [workload.new_tokens] * count)
    decode_once(engine, prompts, PairedTrace(bare=bare))  # warm-up: finds the fastest layouts
    decode_once(ruled, prompts, Trace())
    traces: list[PairedTrace] = []
    ruled_traces: list[Trace] = []
    for _ in range(repeats):
        traces.append(decode_once(engine, prompts, PairedTrace(bare=bare)))
        ruled_traces.append(decode_once(ruled, prompts, Trace()))
    return {
        "batch": workload.batch,
        "repeats": repeats,
        "tokens_per_s": _rates(traces),
        "forwards_per_s": spread([trace.forwards / trace.decode_seconds for trace in traces]),
        "steps": step_times(model, traces, machine),
        "efficiency": spread([trace.efficiency for trace in traces]),
        "rules": RULES,
        "tokens_per_s_with_rules": _rates(ruled_traces),
        "steps_with_rules": step_times(model, ruled_traces, machine),
    }


def _rates(traces: Sequence[Trace]) -> Spread:
    return spread([trace.tokens_generated / trace.decode_seconds for trace in traces])


def _seconds_of(traces: Iterable[Trace], kind: str) -> Iterator[float]:
    """Yields the seconds of the forwards in which every sample took a step of that kind."""
    return (
        record.seconds
        for trace in traces
        for record in trace.records
        if all(entry.kind == kind for entry in record.entries)
    )


def measure_refill(model: Transformer, repeats: int, *, prompts: int = 64, batch: int = 16) -> dict[str, Any]:
    """Measures continuous batching against batches that neither shrink nor refill, for outputs of 32 to 256 tokens."""
    generator = torch.Generator().manual_seed(1)
    limits = (32 + 32 * torch.randint(0, 8, (prompts,), generator=generator)).tolist()
    lengths = torch.randint(8, 64, (prompts,), generator=generator).tolist()
    wanted = random_prompts(model, lengths, limits)
    engine = fixed_engine(model, batch=batch, rows_per_step=4)
    rates: list[tuple[float, float]] = []
    filled = 0.0
    for _ in range(repeats):
        refilled = decode_once(engine, wanted, Trace())
        filled = refilled.slots_filled
        fixed_seconds = 0.0
        for start in range(0, prompts, batch):
            longest = max(limits[start : start + batch])
            group = [Prompt(each.ids, max_new_tokens=longest) for each in wanted[start : start + batch]]
            fixed_seconds += decode_once(engine, group, Trace()).decode_seconds
        rates.append((sum(limits) / refilled.decode_seconds, sum(limits) / fixed_seconds))
    return {
        "prompts": prompts,
        "batch": batch,
        "repeats": repeats,
        "tokens_per_s": spread([refilled for refilled, _ in rates]),
        "tokens_per_s_without_refill": spread([fixed for _, fixed in rates]),
        "ratio": spread([refilled / fixed for refilled, fixed in rates]),
        "slots_filled": filled,
    }


def measure_context(model: Transformer, repeats: int, contexts: tuple[int, ...] = (256, 1024, 4096)) -> list[dict]:
    """Measures the milliseconds of a step after contexts of growing length: only attention grows."""
    engine = fixed_engine(model, batch=1, rows_per_step=4)
    rows: dict[int, list[Trace]] = {context: [] for context in contexts}
    for _ in range(repeats):
        for context, traces in rows.items():
            traces.append(decode_once(engine, random_prompts(model, [context], [32]), Trace()))
    return [
        {"context": context, **{kind: 1000 * median(_seconds_of(traces, kind)) for kind in COMPUTED_STEPS}}
        for context, traces in rows.items()
    ]
