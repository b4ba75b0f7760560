"""What `stepsaver doctor --model M` tries: a checkpoint on a device, decoded, compared with float32 and timed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from stepsaver.bench.limit import decode_once, measure_machine, random_prompts, step_times
from stepsaver.commands._card import card_checks
from stepsaver.commands.doctor import Check
from stepsaver.engine import registry
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.policies.fixed import Fixed
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import positions_between
from stepsaver.engine.rules.rule import Rule, check_rules, parse_rule
from stepsaver.engine.sampling import NonFiniteLogits
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.open_model import OpenModel

NEW_TOKENS = 64
ROWS_PER_STEP = 2  # that are unmasked where steps are timed: about as many as with the 7B model
CONTROL = ("layer_reuse:k=1",)  # leaves nothing out: the tokens must be those without rules
RULES = ("window:refresh=block", "trim:level=changed", "suffix_dropout", "partial_commit")
READ_ROWS = 8  # rows of each prompt whose logits are compared
# How far logits may be from float32's, as a share of their norm: a few times what rounding alone gave.
TOLERATED = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
MEMORY_FACTS = Path("/proc/meminfo")
QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "A train travels 60 km in 2 hours. What is its speed?",
    "Name three colours.",
    "Is 17 a prime number?",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' to German.",
)


def check_up(opened: OpenModel) -> Iterable[Check]:
    """Yields one finding after the other. If the model does not decode, checks that need it to are left out."""
    yield Check("checkpoint", True, _checkpoint(opened))
    started = perf_counter()
    model = opened.load()
    yield Check("weights", True, _weights(model, perf_counter() - started))
    prompts = _prompts(opened)
    plain = Trace()
    try:
        tokens = _decoded(opened, model, prompts, (), plain)
        yield Check("decoding", True, f"{len(prompts)} prompts, {plain.tokens_generated} tokens, all logits finite")
        yield from _with_rules(opened, model, prompts, tokens)
        yield _beside_float32(opened, model, prompts)
    except NonFiniteLogits as error:
        yield Check("decoding", False, f"{error} in {_name(model.dtype)} on {model.device}")
        return
    yield from _timings(opened, model)
    if model.device.type == "cuda":
        yield from card_checks(opened, model, partial(_logits, opened=opened, prompts=prompts))


def _checkpoint(opened: OpenModel) -> str:
    config = opened.config
    return (
        f"{opened.folder.name}, {config.architecture}, {config.layers} layers of {config.hidden}, "
        f"vocabulary {config.vocab}, blocks of {opened.decoding.block_size}"
    )


def _weights(model: Transformer, seconds: float) -> str:
    kept = model.kept
    numbers, bits = kept.float16 + kept.full, 8 * model.bytes_per_weight
    return (
        f"{numbers:,} in maps, {bits:.3g} bits each, {_name(model.dtype)} on {model.device}, loaded in {seconds:.1f} s"
    )


def _prompts(opened: OpenModel) -> list[tuple[int, ...]]:
    """Returns questions if there is a tokenizer, else random ids, the same in every check-up."""
    try:
        tokenizer = opened.tokenizer
        if tokenizer.has_chat_template:
            texts = [tokenizer.chat_prompt([{"role": "user", "content": each}]) for each in QUESTIONS]
        else:
            texts = list(QUESTIONS)
        return [tuple(tokenizer.encode(text)) for text in texts]
    except UsageError:
        random = np.random.default_rng(0)
        lengths = random.integers(5, 80, len(QUESTIONS))
        return [tuple(random.integers(0, opened.config.vocab, length).tolist()) for length in lengths]


def _decoded(
    opened: OpenModel, model: Transformer, prompts: Sequence[tuple[int, ...]], rules: tuple[Rule, ...], trace: Trace
) -> list[list[int]]:
    """Decodes one prompt at a time, as latency is felt, in an engine that checks that nothing stale is read."""
    decoding = replace(opened.decoding, join="off")  # so that each kind of step is timed by itself
    engine = Engine(model, decoder=Denoise(Threshold(), rules), batch_size=1, decoding=decoding, checked=True)
    finished = engine.generate(prompts, max_new_tokens=NEW_TOKENS, trace=trace)
    return [each.ids for each in sorted(finished, key=lambda each: each.index)]


def _with_rules(
    opened: OpenModel, model: Transformer, prompts: list[tuple[int, ...]], tokens: list[list[int]]
) -> Iterable[Check]:
    control = _decoded(opened, model, prompts, tuple(map(parse_rule, CONTROL)), Trace())
    same = sum(ours == theirs for ours, theirs in zip(control, tokens, strict=True))
    says = f"{same} of {len(tokens)} texts as without it"
    yield Check(f"control {CONTROL[0]}", same == len(tokens), says)
    rules = _fitting(opened)
    texts = _decoded(opened, model, prompts, rules, Trace())
    same = sum(ours == theirs for ours, theirs in zip(texts, tokens, strict=True))
    names = " ".join(registry.describe(rule) for rule in rules)
    yield Check("rules", True, f"{same} of {len(tokens)} texts as without ({names})")


def _fitting(opened: OpenModel) -> tuple[Rule, ...]:
    """Returns those of our best rules that make sense for the model."""
    rules: tuple[Rule, ...] = ()
    for rule in map(parse_rule, RULES):
        try:
            check_rules((rule,), opened.decoding, opened.config.layers)
        except UsageError:
            continue
        rules += (rule,)
    return rules


def _beside_float32(opened: OpenModel, model: Transformer, prompts: list[tuple[int, ...]]) -> Check:
    needed, free = 4 * sum(each.numel() for each in opened.outline().parameters()), _free_memory()
    if free is not None and 1.2 * needed > free:
        says = f"not compared: {1.2 * needed / 1e9:.0f} GB of memory are needed, {free / 1e9:.0f} are free"
        return Check("float32 on the CPU", True, says)
    reference = load_model(opened.folder, dtype=torch.float32, device="cpu", weights="float32")
    ours, theirs = (_logits(each, opened, prompts) for each in (model, reference))
    distance = float((ours - theirs).norm() / theirs.norm())
    agreeing = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    most = TOLERATED[model.dtype]
    says = f"logits differ by {distance:.2g} of their norm ({most:g} is allowed), {agreeing:.1%} choose the same token"
    return Check("float32 on the CPU", distance <= most, says)


def _free_memory() -> int | None:
    lines = MEMORY_FACTS.read_text(encoding="utf-8").splitlines() if MEMORY_FACTS.exists() else []
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def _logits(model: Transformer, opened: OpenModel, prompts: list[tuple[int, ...]]) -> Tensor:
    """Returns the logits of the last rows of each prompt, from a forward of its own."""
    found = []
    for prompt in prompts:
        rows = len(prompt)
        kept = {"dtype": model.dtype, "device": model.device, "backend": model.backend}
        cache = KeyValueCache(model.config, slots=1, capacity=rows, **kept)  # type: ignore[arg-type]
        plan = whole_plan(
            "prefill",
            window=positions_between(0, rows),
            reads=positions_between(max(rows - READ_ROWS, 0), rows),
            layers=model.config.layers,
            prediction=opened.decoding.prediction,
        )
        step = Step(0, 0, np.array(prompt), opened.decoding.block_size, plan)
        output = run_step(model, Memory(cache, None, model.rotations(rows)), [step])
        found.append(output.logits.double().cpu())
    return torch.cat(found)


def _timings(opened: OpenModel, model: Transformer) -> Iterable[Check]:
    """Yields median times of one sample's steps, beside the time in which the device could read or multiply as much."""
    machine = measure_machine(model.device, model.dtype)
    says = f"reads {machine.bytes_per_s / 1e9:.4g} GB/s, multiplies {machine.flops_per_s / 1e12:.3g} TFLOP/s"
    yield Check("limits", True, f"{says} in {_name(model.dtype)}, measured")
    plain, ruled = (_timed(opened, model, rules) for rules in ((), _fitting(opened)))
    for kind, each in step_times(model, [plain], machine).items():
        says = (
            f"{each.milliseconds:.3g} ms at batch 1, {each.share:.0%} of what {each.limited_by} allows "
            f"({each.limit_milliseconds:.3g} ms)"
        )
        yield Check(f"{kind} step" if kind in ("full", "sub") else kind, True, says)
    without, with_rules = (each.tokens_generated / each.decode_seconds for each in (plain, ruled))
    says = f"{without:.3g} tokens/s without rules, {with_rules:.3g} with them, {ROWS_PER_STEP} rows a step, once"
    yield Check("rate at batch 1", True, says)


def _timed(opened: OpenModel, model: Transformer, rules: tuple[Rule, ...]) -> Trace:
    """Returns the trace of a decode with a known number of steps, after one that warms up."""
    decoding = replace(opened.decoding, stop_ids=(), join="off")
    engine = Engine(model, decoder=Denoise(Fixed(ROWS_PER_STEP), rules), batch_size=1, decoding=decoding)
    prompts = random_prompts(model, [2 * decoding.block_size], [2 * decoding.block_size])
    decode_once(engine, prompts, Trace())
    return decode_once(engine, prompts, Trace())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
