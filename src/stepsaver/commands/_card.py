"""What `stepsaver doctor --model M --device cuda` adds: a page about the card, to send back. docs/gpu.md says why."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.bench.identity import machine_facts
from stepsaver.bench.limit import decode_once, random_prompts
from stepsaver.commands.doctor import Check
from stepsaver.engine.backends import TORCH
from stepsaver.engine.backends.gpu.choice import check_compile, note_finding
from stepsaver.engine.backends.gpu.fused import OFTEN, Fused
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.linear import Linear
from stepsaver.engine.models.transformer import Norm, Transformer
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.open_model import OpenModel

Logits = Callable[[Transformer], Tensor]
ROWS = (8, 32, 128)  # positions that a map multiplies
ATTENTION = ((1, 8, 512), (1, 32, 512), (16, 32, 512), (16, 32, 4096))  # samples, positions of each, context
LAUNCHES = 2000
DRAFTS = "speculative:positions=24"
# How far compiled functions may take the logits, as a share of their norm. They round as torch does, after every
# operation; what is left is the order of sums.
EQUAL = {torch.float16: 0.005, torch.bfloat16: 0.02}


def card_checks(opened: OpenModel, model: Transformer, logits: Logits) -> Iterator[Check]:
    """One line each; what fails says why and the page goes on."""
    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "card": partial(_card, model),
        "attention": partial(_attention, model),
        "maps": partial(_maps, model),
        "launches": partial(_launches, model, logits),
        "residual stream": partial(_range, model, logits),
        "drafts": partial(_drafts, opened, model),
        "compiled functions": partial(_compiled, opened, model, logits),
    }
    for name, check in checks.items():
        try:
            is_fine, says = check()
        except Exception as error:  # whatever a card does that nobody has seen
            is_fine, says = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield Check(name, is_fine, says)


def _card(model: Transformer) -> tuple[bool, str]:
    facts, triton = machine_facts(model.device), None
    with suppress(PackageNotFoundError):
        triton = version("triton")
    says = f"{facts['device']}, {facts['memory_bytes'] / 1e9:.3g} GB, driver {facts['driver']}"
    if model.device.type == "cuda":
        says += f", compute capability {'.'.join(map(str, torch.cuda.get_device_capability(model.device)))}"
    return True, f"{says}, CUDA {torch.version.cuda}, triton {triton}"


@torch.inference_mode()
def _attention(model: Transformer) -> tuple[bool, str]:
    """By shape, its time and how far it is from the same in float64."""
    config, found, worst = model.config, [], 0.0
    for samples, rows, context in ATTENTION:
        shape = (samples, config.kv_heads, rows * config.heads // config.kv_heads, config.head_dim)
        queries = torch.randn(shape, device=model.device).to(model.dtype)
        keys, values = torch.randn(2, *shape[:2], context, shape[3], device=model.device).to(model.dtype)
        seen = torch.arange(context, device=model.device) < context - 5
        mask = torch.where(seen, 0.0, -torch.inf).to(model.dtype).expand(*shape[:3], -1)
        seconds = _seconds(partial(model.backend.mix, queries, keys, values, mask), model.device)
        mixed = model.backend.mix(queries, keys, values, mask).double()
        exact = F.scaled_dot_product_attention(queries.double(), keys.double(), values.double(), mask.double())
        worst = max(worst, float((mixed - exact).norm() / exact.norm()))
        found.append(f"{samples} x {rows} at {context}: {1e6 * seconds:.0f} us")
    return worst < 0.02, f"memory-efficient, off float64 by {worst:.2g}; {', '.join(found)}"


@torch.inference_mode()
def _maps(model: Transformer) -> tuple[bool, str]:
    """GB/s of weights of each map, at several numbers of positions."""
    attention, mlp = model.each_layer[0].attention, model.each_layer[0].mlp
    maps: dict[str, Linear] = {
        "qkv": attention.qkv,
        "output": attention.output,
        "gate and up": mlp.gate_up,
        "down": mlp.down,
        "head": model.head,
    }
    found = []
    for name, each in maps.items():
        inputs = [torch.randn(rows, each.in_features, device=model.device).to(model.dtype) for rows in ROWS]
        rates = [model.dtype.itemsize * each.numbers / _seconds(partial(each.project, x), model.device) for x in inputs]
        found.append(f"{name} {'/'.join(f'{rate / 1e9:.3g}' for rate in rates)}")
    return True, f"GB/s at {'/'.join(map(str, ROWS))} positions: {', '.join(found)}"


def _launches(model: Transformer, logits: Logits) -> tuple[bool, str]:
    """Of one forward, by torch's profiler; and what one costs the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    logits(model)
    with torch.profiler.profile(activities=activities) as profile:
        logits(model)
    launched = [each for each in profile.events() or [] if each.device_type == torch.autograd.DeviceType.CUDA]
    number = torch.zeros(1, device=model.device)
    started = perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1)
    each = 1e6 * (perf_counter() - started) / LAUNCHES
    return True, f"{len(launched)} in a forward of every prompt, {each:.2f} us each"


def _range(model: Transformer, logits: Logits) -> tuple[bool, str]:
    """The largest number in the residual stream: float16 ends at 65504."""
    largest = [0.0]

    def note(norm: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        h_ND, pending = given[0], given[1] if len(given) > 1 else None
        largest[0] = max(largest[0], float((h_ND if pending is None else h_ND + pending).abs().max()))

    norms = [each for each in model.modules() if isinstance(each, Norm)]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        logits(model)
    finally:
        for hook in hooks:
            hook.remove()
    return largest[0] < 65504, f"at most {largest[0]:.4g}"


def _drafts(opened: OpenModel, model: Transformer) -> tuple[bool, str]:
    """Tokens per second at batch 1 with drafts, beside one token per forward."""
    found = []
    decoding = replace(opened.decoding, stop_ids=(), join="off")
    for text in ("autoregressive", DRAFTS):
        engine = Engine(model, decoder=parse_decoder(text), batch_size=1, decoding=decoding)
        prompts = random_prompts(model, [64], [64])
        decode_once(engine, prompts, Trace())
        trace = decode_once(engine, prompts, Trace())
        found.append(f"{trace.tokens_generated / trace.decode_seconds:.3g} tokens/s with {text}")
    return True, f"{', '.join(found)}, random ids"


def _compiled(opened: OpenModel, model: Transformer, logits: Logits) -> tuple[bool, str]:
    """The logits with and without; what is found is noted for `--compile auto`."""
    check_compile("on", model.device)
    before = model.fused
    model.fused = None
    eager, eager_seconds = _timed_logits(model.prepare(), logits)
    model.fused = fused = Fused()
    started = perf_counter()
    scores = eager.float().to(model.device)
    model.prepare()
    for _ in range(OFTEN):
        logits(model)
        chosen = fused.argmax(scores, opened.decoding.mask_id)[0]
    compiling = perf_counter() - started
    compiled, seconds = _timed_logits(model, logits)
    model.fused = before
    model.prepare()
    distance = float((compiled - eager).norm() / eager.norm())
    is_equal = distance <= EQUAL.get(model.dtype, 1e-4)
    is_equal &= torch.equal(chosen, TORCH.argmax(scores, opened.decoding.mask_id)[0])
    note_finding(opened.config, model.dtype, model.device, equal=is_equal)
    return is_equal, (
        f"logits differ from torch's by {distance:.2g} of their norm, rounding as torch does; {seconds:.3g} s beside "
        f"{eager_seconds:.3g} s, compiled in {compiling:.0f} s; --compile auto is {'on' if is_equal else 'off'}"
    )


def _timed_logits(model: Transformer, logits: Logits) -> tuple[Tensor, float]:
    logits(model)
    started = perf_counter()
    found = logits(model)
    return found, perf_counter() - started


def _seconds(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    taken = []
    for _ in range(times):
        started = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(perf_counter() - started)
    return median(taken)
