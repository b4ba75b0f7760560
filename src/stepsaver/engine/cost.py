"""What a run cost, summed from its records: operations and bytes. No machine is in here."""

from dataclasses import asdict, dataclass

from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.trace import DENOISING, ForwardRecord, SampleStep, Trace


@dataclass(frozen=True)
class Work:
    flops: float
    bytes: float


@dataclass(frozen=True)
class Cost:
    """Totals of a trace. Row-layers are rows summed over layers; reused ones took their delta from the cache."""

    forwards: int
    steps: int  # denoising steps, summed over samples
    rows: int
    attention_row_layers: int
    attention_row_layers_reused: int
    keys_values_row_layers: int
    mlp_row_layers: int
    mlp_row_layers_reused: int
    head_rows: int
    flops: float
    bytes: float
    cache_bytes: int


def entry_flops(config: ModelConfig, entry: SampleStep) -> float:
    """Operations of a step. A multiply-add counts as two; norms, rotations and softmax (under 1 %) as none."""
    query_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    keys_values = 4 * config.hidden * kv_width
    attention = 4 * config.hidden * query_width + 4 * query_width * entry.context
    mlp = 6 * config.hidden * config.mlp
    recomputed = (
        entry.recomputed_context
        * config.layers
        * (keys_values + 4 * config.hidden * query_width + 2 * query_width * entry.recomputed_context + mlp)
    )
    return (
        entry.keys_values_run * keys_values
        + entry.attention_run * attention
        + entry.mlp_run * mlp
        + entry.head_rows * 2 * config.hidden * config.vocab
        + recomputed
    )


def record_work(
    config: ModelConfig, record: ForwardRecord, bytes_per_number: int, bytes_per_weight: float | None = None
) -> Work:
    """The operations and bytes of one forward. It reads weights once, each sample's keys and values once per layer.

    `bytes_per_weight` is for weights that are kept in fewer bits than the arithmetic has.
    """
    if not any(entry.rows for entry in record.entries):
        return Work(0.0, 0.0)
    query_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = (
        record.layers.keys_values * 2 * config.hidden * kv_width
        + record.layers.attention * 2 * config.hidden * query_width
        + record.layers.mlp * 3 * config.hidden * config.mlp
        + (config.hidden * config.vocab if any(entry.head_rows for entry in record.entries) else 0)
    )
    caches = sum(
        2 * kv_width * entry.context * record.layers.attention for entry in record.entries if entry.attention_run
    )
    flops = sum(entry_flops(config, entry) for entry in record.entries)
    return Work(flops, weights * (bytes_per_weight or bytes_per_number) + caches * bytes_per_number)


def trace_cost(config: ModelConfig, trace: Trace, bytes_per_number: int, bytes_per_weight: float | None = None) -> Cost:
    work = [record_work(config, record, bytes_per_number, bytes_per_weight) for record in trace.records]
    entries = list(trace.entries)
    return Cost(
        forwards=trace.forwards,
        steps=sum(entry.kind in DENOISING for entry in entries),
        rows=sum(entry.rows for entry in entries),
        attention_row_layers=sum(entry.attention_run for entry in entries),
        attention_row_layers_reused=sum(entry.attention_reused for entry in entries),
        keys_values_row_layers=sum(entry.keys_values_run for entry in entries),
        mlp_row_layers=sum(entry.mlp_run for entry in entries),
        mlp_row_layers_reused=sum(entry.mlp_reused for entry in entries),
        head_rows=sum(entry.head_rows for entry in entries),
        flops=sum(each.flops for each in work),
        bytes=sum(each.bytes for each in work),
        cache_bytes=trace.cache_bytes,
    )


def cost_by_kind(config: ModelConfig, trace: Trace) -> dict[str, dict[str, float]]:
    """Steps, positions x layers and operations of each kind of step."""
    totals: dict[str, dict[str, float]] = {}
    for entry in trace.entries:
        total = totals.setdefault(entry.kind, {"steps": 0, "row_layers": 0, "row_layers_reused": 0, "flops": 0.0})
        total["steps"] += 1
        total["row_layers"] += entry.mlp_run
        total["row_layers_reused"] += entry.mlp_reused
        total["flops"] += entry_flops(config, entry)
    return totals


def as_json(cost: Cost) -> dict[str, float]:
    return asdict(cost)
