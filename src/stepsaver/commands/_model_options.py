"""The flags that every command with a model shares, and the engine they describe."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.engine.arguments import option
from stepsaver.engine.defaults import BATCH_SIZE, COMPILE, DECODE, JOINS, THRESHOLD, WEIGHTS
from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds to import and `--help` does not need it
    from stepsaver.engine.curve import Curve
    from stepsaver.engine.engine import Engine
    from stepsaver.engine.trace import Trace
    from stepsaver.evaluation.open_model import OpenModel
    from stepsaver.evaluation.recipe import Recipe

SETTLED_BY_RECIPE = ("decode", "rule", "policy", "threshold", "sub_block_size", "join")


DECODE_HELP = (
    f"{DECODE}, speculative, `speculative:field=value,...` or autoregressive (default: the model's, mostly {DECODE})"
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="embedded",
        metavar="M",
        help="a checkpoint folder, a hub id, or `embedded`, the small model of the package (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", default="auto", help="auto, float32, float64, bfloat16 or float16 (default: %(default)s)"
    )
    parser.add_argument(
        "--weights",
        default=WEIGHTS,
        help="on a CPU: auto (in 16 bits where float16 holds them), float32 or float16 (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        default=COMPILE,
        help="on a GPU, functions that torch compiles: auto (if doctor found them equal), on or off (default: auto)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=option("batch_size"),
        metavar="N",
        help=f"samples decoded together (default: the recipe's, else {BATCH_SIZE})",
    )
    decoding = parser.add_argument_group("decoding")
    add_recipe_argument(decoding)
    decoding.add_argument("--decode", metavar="D", help=DECODE_HELP)
    decoding.add_argument(
        "--draft-adapter",
        type=Path,
        metavar="FOLDER",
        help="a LoRA on `o_proj`, in PEFT's layout, that is on while speculative decoding drafts",
    )
    decoding.add_argument(
        "--threshold", type=option("threshold"), metavar="X", help=f"unmask positions surer than this, as {THRESHOLD}"
    )
    decoding.add_argument("--policy", metavar="P", help="another policy than the model's, `name:field=value,...`")
    decoding.add_argument(
        "--rule", action="append", default=[], metavar="R", help="a reuse rule, `name:field=value,...`; may be repeated"
    )
    add_checkpoint_arguments(decoding)
    decoding.add_argument(
        "--sub-block-size",
        type=option("sub_block_size"),
        metavar="N",
        help="positions of a sub-block, if not the model's",
    )
    decoding.add_argument(
        "--stop-id", type=option("stop_id"), action="append", metavar="N", help="another stop token; may be repeated"
    )
    decoding.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    decoding.add_argument("--block-cache", action=argparse.BooleanOptionalAction, default=True)
    decoding.add_argument(
        "--join", choices=JOINS, help="steps that share a forward; same tokens (default: the recipe's, else auto)"
    )
    add_curve_argument(decoding)


def add_curve_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--curve", type=Path, metavar="FILE", help="what a forward costs, by which `auto` decides: a run's curve.json"
    )


def given_curve(options: argparse.Namespace) -> "Curve | None":
    from stepsaver.engine.curve import read_curve

    return None if options.curve is None else read_curve(options.curve)


def add_recipe_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        type=Path,
        metavar="FILE",
        help="decoder, rules, policy, sub-blocks, join and batch size of a tuning",
    )


def take_recipe(options: argparse.Namespace) -> "Recipe | None":
    """Fills in the flags that a recipe sets, and returns the recipe. A batch size that is given stays."""
    given = [name for name in SETTLED_BY_RECIPE if getattr(options, name)]
    if options.recipe is None:
        recipe = None
    elif given:
        raise UsageError(f"--recipe and --{given[0].replace('_', '-')} exclude each other")
    else:
        from stepsaver.evaluation.recipe import read_recipe  # it needs the extra `bench`, and decoding does not

        recipe = read_recipe(options.recipe)
        options.decode, options.rule, options.policy = recipe.decode, list(recipe.rules), recipe.measured_policy
        options.sub_block_size, options.join = recipe.sub_block_size, recipe.join
    if options.batch_size is None:
        options.batch_size = recipe.batch_size if recipe else BATCH_SIZE
    options.join = options.join or "auto"
    return recipe


def say_differences(recipe: "Recipe | None", model: str, *, dtype: str, device: str, batch_size: int) -> None:
    """Prints one line on standard error if the recipe was measured with something else."""
    from stepsaver.engine.machine import choose_device, choose_dtype

    if recipe is None:
        return
    chosen = choose_device(device)
    named = str(choose_dtype(dtype, chosen)).removeprefix("torch.")
    said = recipe.differences(model=model, dtype=named, device=chosen.type, batch_size=batch_size)
    if said:
        print(f"note: {said}", file=sys.stderr)


def add_checkpoint_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds flags for what some checkpoints leave out of their files, and nobody can guess."""
    group.add_argument(
        "--block-size", type=option("block_size"), metavar="N", help="positions of a block, if not the model's"
    )
    group.add_argument("--mask-id", type=option("mask_id"), metavar="N", help="the mask token (default: the model's)")


def open_chosen_model(options: argparse.Namespace) -> "OpenModel":
    """Finds the model's folder and reads its configuration. Raises for whatever is wrong with the flags."""
    from stepsaver.evaluation.open_model import open_model

    recipe = take_recipe(options)
    say_differences(recipe, options.model, dtype=options.dtype, device=options.device, batch_size=options.batch_size)
    return open_model(
        options.model,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        compile=options.compile,
        block_size=options.block_size,
        sub_block_size=options.sub_block_size,
        mask_id=options.mask_id,
        stop_ids=None if options.stop_id is None else tuple(options.stop_id),
        prefix_cache=options.prefix_cache,
        block_cache=options.block_cache,
        join=options.join,
    )


def build_engine(options: argparse.Namespace, opened: "OpenModel") -> "Engine":
    """Checks decoder, policy and rules, then loads the weights."""
    decode = options.decode or (DECODE if getattr(options, "trace_against", None) else None)
    decoder = opened.decoder(decode, policy=options.policy, threshold=options.threshold, rules=options.rule)
    engine = opened.engine(
        decoder, batch_size=options.batch_size, curve=given_curve(options), draft_adapter=options.draft_adapter
    )
    if said := opened.differences():
        print(f"note: {said}", file=sys.stderr)
    return engine


def describe_engine(engine: "Engine", model: str) -> dict[str, Any]:
    """Returns the settings that were in effect, for every result."""
    from dataclasses import asdict

    import torch

    from stepsaver.engine import registry

    return {
        "model": model,
        "architecture": engine.model.config.architecture,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "weights": asdict(engine.model.kept),  # how many weights of the maps are kept in which way
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
        "decoding": asdict(engine.decoding),
        "decode": engine.decoder.text,
        "policy": registry.describe(engine.decoder.policy) if engine.decoder.policy else None,
        "rules": [registry.describe(rule) for rule in engine.decoder.rules],
        "batch_size": engine.batch_size,
    }


def cost_document(engine: "Engine", trace: "Trace") -> dict[str, Any]:
    """Returns what was executed, summed from the records of the trace."""
    from stepsaver.bench.identity import peak_memory
    from stepsaver.engine.cost import as_json, cost_by_kind, trace_cost

    config = engine.model.config
    cost = trace_cost(config, trace, engine.model.dtype.itemsize, engine.model.bytes_per_weight)
    return as_json(cost) | {
        "by_kind": cost_by_kind(config, trace),
        "peak_memory_bytes": peak_memory(engine.model.device),
    }


def throughput(trace: "Trace", **tokens: int) -> dict[str, Any]:
    """Returns seconds and rates. `tokens` is the one count, under its own name, that the rate is computed from."""
    seconds = trace.decode_seconds
    return {
        **tokens,
        "decode_seconds": seconds,
        "prefill_seconds": trace.prefill_seconds,
        "tokens_per_s": sum(tokens.values()) / seconds if seconds else 0.0,
        "samples": trace.samples,
        "counts": "forwards and choices, prefill included; no loading, warm-up, tokenization; tokens to the stop",
    }
