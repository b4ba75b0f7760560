"""The GPU path as far as it can be proved without one: devices never mix, and the host waits once per forward."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stepsaver.engine import registry
from stepsaver.engine.attention import LINE, Segment, plan_attending
from stepsaver.engine.backends import TORCH
from stepsaver.engine.backends.backend import Upload
from stepsaver.engine.backends.gpu.backend import GPU
from stepsaver.engine.backends.gpu.upload import OneCopy
from stepsaver.engine.backends.packed import Mask, PackedRun
from stepsaver.engine.backends.torch_attention import attend_folded
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.defaults import ESTIMATORS
from stepsaver.engine.engine import Engine
from stepsaver.engine.forward import Forward
from stepsaver.engine.policies.policy import Policy, parse_policy
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import Trace
from tests.conftest import tiny_config
from tests.engine.rule_cases import ACTING, combined_rule_sets, rule_sets
from tests.engine.stand_in_device import DEVICE, HostWaits, MixedDevices, StandIn, stand_in_model

DTYPES = (torch.float16, torch.bfloat16)
PROMPTS = [tuple(range(5, 5 + length)) for length in (11, 16)]  # a block and more, whole blocks
NEW_TOKENS = 7
RULE_SETS = [(), *rule_sets(ACTING), *combined_rule_sets()]
FIRST = {name: texts[:1] for name, texts in ACTING.items()}  # of each rule, in the other precision as well
ASKING = "adaptive_layers"  # reads the drift in the middle of a forward
# Settings of policies that need some, or have more than one way to decode; the others are tried as they are.
SETTINGS = {
    "quota": ["quota:steps=2"],
}
POLICIES = [text for name in registry.found_in("stepsaver.engine.policies") for text in SETTINGS.get(name, [name])]

# What a layer launches on one sample: 4 multiplications, 2 norms, 2 additions, 3 to rotate queries and keys, 1 to write
# keys and values, attention and 2 to lay out its queries and its result, 2 of the MLP's gate.
LAUNCHES_PER_LAYER = 17
# Tokens, positions, where keys and values go, which rows go on after the last layer: one buffer.
UPLOADS_PER_FORWARD = 1
LAUNCHES_BEFORE_THE_FIRST_LAYER = 3  # embedding and rotations, of the last layer's rows too; the upload is a fourth


def decoded(
    rules: tuple[Rule, ...] = (),
    *,
    dtype: torch.dtype = torch.float16,
    policy: Policy | None = None,
    decoder: Decoder | None = None,
    batch_size: int = 2,
    layers: int = 3,
    prompts: list[tuple[int, ...]] = PROMPTS,
    sampling: Sampling | None = None,
    **changes: Any,
) -> tuple[StandIn, Trace]:
    config = tiny_config(layers=layers)
    decoding = resolve_decoding(config, **({"sub_block_size": 4, "stop_ids": ()} | changes))
    model = stand_in_model(config, dtype)
    engine = Engine(
        model,
        decoder=decoder or Denoise(policy or parse_policy("threshold"), rules),
        batch_size=batch_size,
        decoding=decoding,
        checked=True,
    )
    trace = Trace()
    with StandIn(config) as device:
        finished = list(engine.generate(prompts, max_new_tokens=NEW_TOKENS, sampling=sampling, trace=trace))
    assert [len(each.ids) for each in finished] == [NEW_TOKENS] * len(prompts)
    return device, trace


def named(value: Any) -> str:
    return "+".join(map(registry.describe, value)) or "none" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [*((rules, torch.float16) for rules in RULE_SETS), *((rules, torch.bfloat16) for rules in rule_sets(FIRST))],
    ids=named,
)
def test_rules_wait_for_the_device_once_per_forward(rules: tuple[Rule, ...], dtype: torch.dtype) -> None:
    device, trace = decoded(rules, dtype=dtype)
    asked = device.transfers - trace.forwards
    if any(rule.name == ASKING for rule in rules):
        steps = sum(any(e.kind in ("full", "sub") for e in record.entries) for record in trace.records)
        assert 0 <= asked <= steps, "one more where a forward asks"
    else:
        assert asked == 0


@pytest.mark.parametrize("join", ["off", "on"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_joined_forwards_and_missing_caches_wait_once(join: str, prefix_cache: bool) -> None:
    device, trace = decoded(join=join, prefix_cache=prefix_cache)
    assert device.transfers == trace.forwards


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_wait_once(policy: str) -> None:
    device, trace = decoded(policy=parse_policy(policy))
    assert device.transfers == trace.forwards


@pytest.mark.parametrize(
    "text",
    [
        "autoregressive",
        "speculative:positions=0,span=4",
        "speculative:positions=20",
        "speculative:positions=12,context=block",
    ],
)
def test_decoders_wait_once(text: str) -> None:
    device, trace = decoded(decoder=parse_decoder(text))
    assert device.transfers == trace.forwards


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampling_waits_once(dtype: torch.dtype) -> None:
    device, trace = decoded(dtype=dtype, sampling=Sampling(temperature=0.7, top_p=0.9))
    assert device.transfers == trace.forwards


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scoring_waits_once(estimator: Any, dtype: torch.dtype) -> None:
    config = tiny_config()
    engine = Engine(stand_in_model(config, dtype), batch_size=2, decoding=resolve_decoding(config, sub_block_size=4))
    requests = [ScoreRequest(prompt, (7, 8, 9, 10, 11)[: 1 + place]) for place, prompt in enumerate(PROMPTS * 3)]
    trace = Trace()
    with StandIn(config) as device:
        scores = list(engine.score(requests[:5], estimator=estimator, trace=trace))
    assert len(scores) == 5
    assert device.transfers == trace.forwards


@pytest.mark.parametrize("changes", [{}, {"architecture": "SDARForCausalLM", "head_norms": True}], ids=["qwen", "sdar"])
def test_heads_with_norms_stay_on_the_device(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    engine = Engine(stand_in_model(config, torch.bfloat16), decoding=resolve_decoding(config, sub_block_size=4))
    trace = Trace()
    with StandIn(config) as device:
        list(engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, trace=trace))
    assert device.transfers == trace.forwards


def launches_per_layer(rules: tuple[Rule, ...] = (), **options: Any) -> tuple[Counter[str], float]:
    """What one more layer launches in a forward that runs all its rows in all layers: two depths, the same steps."""
    (few, trace), (many, other) = (decoded(rules, layers=layers, join="off", **options) for layers in (3, 7))
    assert trace.forwards == other.forwards
    more = many.launches - few.launches
    return Counter({name: count // (4 * trace.forwards) for name, count in more.items()}), more.total() / (
        4 * trace.forwards
    )


def test_launches_of_a_layer_do_not_grow_unnoticed() -> None:
    counted, each = launches_per_layer(batch_size=1, prompts=PROMPTS[:1])
    assert each == LAUNCHES_PER_LAYER, counted
    assert counted["linear"] == 4
    assert counted["_scaled_dot_product_efficient_attention"] == 1
    assert "scaled_dot_product_attention" not in counted, "torch would choose"
    exact, _ = launches_per_layer(batch_size=1, prompts=PROMPTS[:1], dtype=torch.float64)
    assert exact["scaled_dot_product_attention"] == 1, "the named one has no float64"


@pytest.mark.parametrize("rules", [(), ("window:refresh=block", "trim:level=changed"), ("suffix_dropout",)], ids=str)
def test_index_tensors_are_built_once_where_layers_run_the_same_rows(rules: tuple[str, ...]) -> None:
    uploads = {
        layers: decoded(tuple(map(parse_rule, rules)), layers=layers, batch_size=1, prompts=PROMPTS[:1], join="off")
        for layers in (3, 6)
    }
    (few, trace), (many, _) = uploads[3], uploads[6]
    assert few.uploads == many.uploads, "they are copied once, however many layers there are"
    rotations = 1  # the table of all positions, before the first forward
    assert few.uploads - rotations <= UPLOADS_PER_FORWARD * trace.forwards


def test_a_forward_sends_one_buffer_and_little_runs_before_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, before = [], Forward.run_layers

    def run_layers(forward: Forward, layers: range, run: PackedRun) -> None:
        if not layers.start:
            launches.append((device.uploads, device.launches.total()))
        before(forward, layers, run)

    config = tiny_config(layers=3)
    model = stand_in_model(config, torch.float16)
    decoding = resolve_decoding(config, sub_block_size=4, stop_ids=(), join="off")
    engine = Engine(model, decoder=Denoise(), batch_size=1, decoding=decoding)
    monkeypatch.setattr(Forward, "run_layers", run_layers)
    monkeypatch.setattr(type(GPU), "begin", lambda self: launches.append((device.uploads, device.launches.total())))
    with StandIn(config) as device:
        list(engine.generate(PROMPTS[:1], max_new_tokens=NEW_TOKENS))
    asked = [(last[0] - first[0], last[1] - first[1]) for first, last in list(pairwise(launches))[::2]]
    assert max(asked) == (1, LAUNCHES_BEFORE_THE_FIRST_LAYER)
    assert {uploads for uploads, _ in asked} == {1}


def test_what_does_not_fit_in_the_buffer_is_sent_in_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneCopy, "size", 256)
    arrays = [np.arange(count) + 7 * count for count in (3, 40, 1, 9)]
    upload = OneCopy(torch.device("cpu"))
    there = [upload.tensor(each) for each in arrays]
    upload.send()
    assert [each.tolist() for each in there] == [each.tolist() for each in arrays]
    assert all(each.data_ptr() % 16 == 0 for each in there)
    assert OneCopy.size >= 256 + 320, "the next forward's buffer holds it all"


def test_a_buffer_that_is_used_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = OneCopy(DEVICE)

    def one_for_all(self: object, device: torch.device) -> OneCopy:
        kept._used = kept._sent = 0
        return kept

    monkeypatch.setattr(type(GPU), "upload", one_for_all)
    with pytest.raises(AssertionError, match="may still read it"):
        decoded(prefix_cache=False)  # contexts run before the steps, and the host does not wait between


@pytest.mark.parametrize("is_masked", [False, True])
def test_folded_heads_mix_as_shared_ones_do(is_masked: bool) -> None:
    """What other devices do instead of sharing key-value heads, with values: on the CPU, in double precision."""
    random = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((5, 6, 8), (1, 2, 11, 8), (1, 2, 11, 8))
    )
    mask = torch.arange(11) < torch.arange(7, 12)[:, None] if is_masked else None
    shared = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=True
    )
    added = None if mask is None else Mask(torch.where(mask, 0.0, -torch.inf).double()[None, None], 11)
    folded = attend_folded(queries, keys, values, added, TORCH)
    assert torch.allclose(folded, shared[0].transpose(0, 1), atol=1e-12)


def test_products_are_summed_in_32_bits() -> None:
    products = torch.backends.cuda.matmul
    flags = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    for flag in flags:
        setattr(products, flag, True)
    torch.set_float32_matmul_precision("high")
    decoded(batch_size=1, prompts=PROMPTS[:1])
    assert not any(getattr(products, flag) for flag in flags)
    assert torch.get_float32_matmul_precision() == "highest"


def test_forwards_that_read_nothing_wait_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(type(GPU), "wait", lambda self, device: waited.append(device))
    _, trace = decoded(prefix_cache=False)  # so that contexts run before every forward, for their keys and values
    contexts = [entry for record in trace.records for entry in record.entries if entry.recomputed_context]
    assert waited == [DEVICE] * len(contexts) != []


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_masks_hold_what_queries_see_in_lines_that_a_gpu_reads_as_they_are(dtype: torch.dtype) -> None:
    cache = KeyValueCache(tiny_config(), slots=3, capacity=29, dtype=dtype, device=torch.device("cpu"))
    views = np.array([[7, 0, 0], [13, 5, 9], [9, 0, 4]]), np.array([[21, 3, 20], [4, 4, 4]])
    segments = [Segment(0, 3, 0, views[0]), Segment(3, 5, 2, views[1])]
    (group,) = plan_attending(segments, cache, Upload()).grouped
    folded = group.mask.folded(2, 3, 3)
    assert folded.shape == (3 if isinstance(group.slots, slice) else 2, 2, 9, 21)
    assert all(stride % LINE == 0 for stride in folded.stride()[:-1])
    for place, lines in zip((0, -1), views, strict=True):
        for row, (seen, gap, resume) in enumerate(lines.tolist()):
            expected = [0.0 if at < seen and not gap <= at < resume else -torch.inf for at in range(21)]
            for head in range(3):
                assert folded[place, 1, head * 3 + row].tolist() == expected
    assert (folded[-1, 0, 2::3] == 0).sum(-1).tolist() == [1, 1, 1], "padding sees one place"


def test_what_mixes_devices_or_waits_is_found() -> None:
    """The stand-in itself: it would be worth nothing if it let these through."""
    there, here = torch.zeros(3, device=DEVICE), torch.zeros(3)
    with StandIn(tiny_config()) as device:
        with pytest.raises(MixedDevices):
            there + here
        with pytest.raises(MixedDevices):
            here[torch.zeros(2, dtype=torch.int64, device=DEVICE)]
        with pytest.raises(HostWaits):
            there.sum().item()
        with pytest.raises((HostWaits, NotImplementedError)):
            there[there > 0]
        assert device.transfers == 0
        there.cpu()
        here.to(DEVICE)
    assert (device.transfers, device.uploads) == (1, 1)
