"""The options that every command with a model shares, and the engine they describe."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds to import and `--help` does not need it
    from stepsaver.engine.decoding import Decoding
    from stepsaver.engine.engine import Engine
    from stepsaver.engine.models.config import ModelConfig
    from stepsaver.engine.trace import Trace

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


class ModelChoice(NamedTuple):
    """A checkpoint folder whose configuration was read, before any weights are."""

    folder: Path
    config: "ModelConfig"
    decoding: "Decoding"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="a checkpoint folder, a hub id, or `embedded`")
    parser.add_argument("--dtype", default="auto", help=f"{', '.join(DTYPES)} (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="samples decoded together (default: 1)")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--threshold", type=float, metavar="X", help="reveal rows surer than this (default: 0.9)")
    decoding.add_argument("--policy", metavar="P", help="another decode policy, `name:field=value,...`")
    decoding.add_argument(
        "--rule", action="append", default=[], metavar="R", help="a reuse rule, `name:field=value,...`; may be repeated"
    )
    decoding.add_argument("--block-size", type=int, metavar="N", help="rows of a block (default: the model's)")
    decoding.add_argument("--sub-block-size", type=int, metavar="N", help="rows of a sub-block (default: 8)")
    decoding.add_argument("--mask-id", type=int, metavar="N", help="the mask token (default: the model's)")
    decoding.add_argument("--stop-id", type=int, action="append", metavar="N", help="a stop token; may be repeated")
    decoding.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    decoding.add_argument("--block-cache", action=argparse.BooleanOptionalAction, default=True)


def choose_model(options: argparse.Namespace) -> ModelChoice:
    """Finds the folder and reads its configuration; whatever is wrong with the options is said here."""
    from stepsaver.engine.decoding import resolve_decoding
    from stepsaver.engine.models.config import read_config
    from stepsaver.evaluation.model_source import read_mask_id, resolve_model

    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    if options.batch_size < 1:
        raise UsageError(f"batch size {options.batch_size} is not positive")
    folder = resolve_model(options.model)
    config = read_config(folder)
    mask_id = options.mask_id
    if mask_id is None and config.mask_id is None:
        mask_id = read_mask_id(folder)
    decoding = resolve_decoding(
        config,
        block_size=options.block_size,
        sub_block_size=options.sub_block_size,
        mask_id=mask_id,
        stop_ids=None if options.stop_id is None else tuple(options.stop_id),
        prefix_cache=options.prefix_cache,
        block_cache=options.block_cache,
    )
    return ModelChoice(folder, config, decoding)


def build_engine(options: argparse.Namespace, choice: ModelChoice) -> "Engine":
    """Checks policy and rules, then loads the weights."""
    import torch

    from stepsaver.engine.decode.policy import parse_policy
    from stepsaver.engine.engine import Engine, choose_device, choose_dtype
    from stepsaver.engine.models.load import load_model
    from stepsaver.engine.reuse.rule import parse_rule

    if options.policy is not None and options.threshold is not None:
        raise UsageError("--policy and --threshold exclude each other; write --policy threshold:threshold=...")
    threshold = 0.9 if options.threshold is None else options.threshold
    policy = parse_policy(options.policy or f"threshold:threshold={threshold}")
    rules = tuple(parse_rule(text) for text in options.rule)
    device: torch.device = choose_device(options.device)
    model = load_model(choice.folder, dtype=choose_dtype(options.dtype, device), device=device)
    return Engine(model, decode=policy, reuse=rules, max_batch=options.batch_size, decoding=choice.decoding)


def describe_engine(engine: "Engine", model: str) -> dict[str, Any]:
    """What was effective, for every result."""
    from dataclasses import asdict

    from stepsaver.engine import registry

    return {
        "model": model,
        "architecture": engine.model.config.architecture,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "decoding": asdict(engine.decoding),
        "policy": registry.describe(engine.policy),
        "rules": [registry.describe(rule) for rule in engine.rules],
        "batch_size": engine.max_batch,
    }


def cost_document(engine: "Engine", trace: "Trace") -> dict[str, Any]:
    """What was executed, summed from the records of the trace."""
    from stepsaver.engine.cost import as_json, cost_by_kind, trace_cost

    config = engine.model.config
    cost = trace_cost(config, trace, engine.model.dtype.itemsize)
    return as_json(cost) | {"by_kind": cost_by_kind(config, trace), "peak_memory_bytes": peak_memory(engine)}


def peak_memory(engine: "Engine") -> int:
    """The most memory in use so far: of the device, or of this process."""
    import resource

    import torch

    if engine.model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.model.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def throughput(trace: "Trace", **tokens: int) -> dict[str, Any]:
    """Seconds and rates; `tokens` is the one count that the rate is of, under its name."""
    seconds = trace.decode_seconds
    return {
        **tokens,
        "decode_seconds": seconds,
        "prefill_seconds": trace.prefill_seconds,
        "tokens_per_s": sum(tokens.values()) / seconds if seconds else 0.0,
        "samples": trace.samples,
        "counts": "forwards and choices, prefill included; no loading, warm-up, tokenization; tokens to the stop",
    }
