"""Nemotron-Labs-Diffusion: token for token and forward for forward what its public decoder produces, for a part of its
cases that is here and all of those in the shared folder; and beside literal evaluations on random models.
"""

import json
import math
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stepsaver.cli import main
from stepsaver.engine import registry
from stepsaver.engine.batch import StepEvent
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.decoders.autoregressive import Autoregressive
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.adapter import read_adapter
from stepsaver.engine.models.config import parse_config
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.rope import Rope, rotation_table
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.policies.quota import Quota
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import positions_between
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import DENOISING, SampleStep
from tests.conftest import SHARED, TESTS, sharpened, tiny_config
from tests.engine.golden_cases import read_golden
from tests.engine.literal_nemotron import Literal, causal, seeing_itself
from tests.engine.rule_cases import ACTING, combined_rule_sets, rule_sets
from tests.engine.test_score import plain_logits

FOLDERS = [
    TESTS / "golden_nld",
    *(
        pytest.param(SHARED / "golden_nld" / name, marks=pytest.mark.long, id=name)
        for name in ("trained-b8", "untrained-b16")
    ),
]
KINDS = {"causal": ("prefill", "commit", "verify"), "block": ("full", "draft")}


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Path, Transformer]:
    if not request.param.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    return request.param, load_model(request.param, dtype=dtype)


def decoder_of(case: dict) -> Decoder:
    if case["mode"] == "autoregressive":
        return Autoregressive()
    if case["mode"] == "linear":
        return Speculative(positions=0, span=case["block_size"])
    if case["threshold"] is None:
        return Denoise(Quota(case["denoising_steps"]))
    return Denoise(Threshold(case["threshold"], strict=False))


def text_of(case: dict) -> list[int]:
    ids = case["output"][len(case["prompt"]) :][: case["max_new_tokens"]]
    return ids[: ids.index(case["stop_token"]) + 1] if case["stop_token"] in ids else ids


def assert_same_rounds(steps: list[SampleStep], case: dict) -> None:
    """Forward for forward, up to the draft that ours cuts at the limit."""
    prompt, trace = len(case["prompt"]), case["trace"]
    known, stop = prompt + 1, prompt + len(text_of(case))
    end = prompt + case["max_new_tokens"]
    first, *ours = steps
    assert (first.kind, first.rows) == ("prefill", prompt)
    for (_, drafted), (_, verified, accepted) in zip(trace[1::2], trace[2::2], strict=True):
        if end - known < drafted:
            return  # fewer masks guess otherwise
        if known >= stop:
            break
        draft, step, *ours = ours
        assert (draft.kind, draft.rows, step.kind) == ("draft", drafted, "verify")
        assert step.rows in (verified, step.drafted)  # nothing is verified behind a stop token that was drafted
        assert step.unmasked == min(accepted + 1, stop - known)
        known += step.unmasked
    assert ours == []


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("mode", ["autoregressive", "block", "linear"])
def test_every_case_equals_the_public_decoder(golden: tuple[Path, Transformer], mode: str, batch_size: int) -> None:
    folder, model = golden
    cases = [case for case in read_golden(folder)["cases"] if case["mode"] == mode]
    settings = ("block_size", "threshold", "denoising_steps", "stop_token")
    for _, group in groupby(cases, key=lambda case: [case[name] for name in settings]):
        same = list(group)
        decoding = resolve_decoding(model.config, block_size=same[0]["block_size"], stop_ids=(same[0]["stop_token"],))
        engine = Engine(model, decoder=decoder_of(same[0]), decoding=decoding, batch_size=batch_size, checked=True)
        prompts = [Prompt(tuple(case["prompt"]), max_new_tokens=case["max_new_tokens"]) for case in same]
        found = list(engine.generate(prompts, max_new_tokens=0))
        assert len(found) == len(same)
        for completion in found:
            case = same[completion.index]
            assert completion.ids == text_of(case), case["prompt"]
            if mode == "linear":
                assert_same_rounds(completion.steps, case)
                continue
            rest = [kind for kind, *_ in case["trace"][len(completion.steps) :]]  # of the block in which the text ended
            assert set(rest[:-1]) <= ({"block"} if mode == "block" else set())
            for step, (kind, count, *_) in zip(completion.steps, case["trace"], strict=False):
                assert step.kind in KINDS[kind], case["prompt"]
                assert step.rows == count, case["prompt"]


def test_plain_logits(golden: tuple[Path, Transformer]) -> None:
    folder, model = golden
    stored = load_file(folder / "forward.safetensors")
    ids, start = stored["ids"].flatten().numpy(), int(stored["start"])
    cache = KeyValueCache(model.config, slots=1, capacity=len(ids), dtype=model.dtype, device=model.device)
    memory = Memory(cache, None, model.rotations(len(ids)))

    def logits(first: int, block_size: int) -> torch.Tensor:
        window = positions_between(0, len(ids) - first)
        plan = whole_plan("prefill", window=window, reads=window, layers=model.config.layers)
        return run_step(model, memory, [Step(0, first, np.array(ids[first:]), block_size, plan)]).logits

    causal, block = logits(0, 1), logits(start, len(ids) - start)
    assert torch.allclose(causal.double(), stored["causal_logits"].view_as(causal).double(), atol=1e-4, rtol=0)
    assert torch.allclose(
        block.double(), stored["block_logits"][..., start:, :].view_as(block).double(), atol=1e-4, rtol=0
    )


PROMPTS = [(5, 6, 7), tuple(range(10, 26)), (9,), tuple(range(20, 31))]
FITTING = [
    rules
    for rules in rule_sets(ACTING) + combined_rule_sets()
    if not {"window", "suffix_dropout", "partial_commit"} & {rule.name for rule in rules}
]


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    rope = Rope(theta=1e4, original_positions=16, query_growth=0.1, magnitude=1.1)
    own = {"architecture": "NemotronLabsDiffusionModel", "predicts": "both", "qkv_bias": False, "rope": rope}
    return sharpened(random_model(tiny_config(**own), dtype=torch.float64, seed=3), factor=14.0)


@pytest.fixture(scope="module")
def toy() -> Transformer:
    return load_model(TESTS / "golden_nld", dtype=torch.float64)


def engine_of(model: Transformer, decoder: Decoder | None = None, *, batch_size: int = 1, **options) -> Engine:
    decoding = resolve_decoding(model.config, **({"stop_ids": ()} | options))
    decoder = decoder or Denoise(Threshold(0.5, strict=False))
    return Engine(model, decoder=decoder, batch_size=batch_size, decoding=decoding, checked=True)


def texts(engine: Engine, prompts: list = PROMPTS, limit: int = 28, **options) -> list[list[int]]:
    found = engine.generate(prompts, max_new_tokens=limit, **options)
    return [each.ids for each in sorted(found, key=lambda each: each.index)]


def literal_of(model: Transformer, stop: int | None = None) -> Literal:
    assert model.config.mask_id is not None
    return Literal(lambda ids, seen: plain_logits(model, list(ids), seen), model.config.mask_id, stop)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=4),
    size=st.integers(1, 17),
    asked=st.one_of(st.floats(0, 1), st.integers(1, 20), st.none()),
    stop=st.integers(0, 50),
    batch_size=st.integers(1, 4),
    options=st.fixed_dictionaries({"prefix_cache": st.booleans(), "join": st.sampled_from(["on", "off"])}),
    is_trained=st.booleans(),
    seed=st.integers(0, 9),
)
def test_texts_are_those_of_the_literal_evaluation(
    toy: Transformer, tiny: Transformer, lengths, size, asked, stop, batch_size, options, is_trained, seed
) -> None:
    """Random prompts, limits, block sizes, thresholds and quotas; the stop token may come before masks."""
    model = toy if is_trained else tiny
    generator = np.random.default_rng(seed)
    prompts = [Prompt(tuple(generator.integers(3, 50, length).tolist()), None, limit) for length, limit in lengths]
    literal, alone = literal_of(model, stop), engine_of(model, Autoregressive(), stop_ids=(stop,))
    block: dict = {"threshold": asked} if isinstance(asked, float) else {"steps": asked}
    policy = Threshold(asked, strict=False) if isinstance(asked, float) else Quota(asked)
    blocks = engine_of(model, Denoise(policy), batch_size=batch_size, stop_ids=(stop,), block_size=size, **options)
    expected = [literal.block(each.ids, each.max_new_tokens, size=size, **block).text for each in prompts]
    assert texts(blocks, prompts) == expected
    expected = [literal.autoregressive(each.ids, each.max_new_tokens).text for each in prompts]
    assert texts(alone, prompts) == expected


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=4),
    positions=st.sampled_from([0, 2, 5, 17, 40, "auto"]),
    span=st.integers(1, 20),
    stop=st.integers(0, 50),
    options=st.fixed_dictionaries({"block_size": st.sampled_from([1, 3, 8])}),
    batch_size=st.integers(1, 4),
    sampling=st.sampled_from([Sampling(), Sampling(0.7, seed=4)]),
    is_trained=st.booleans(),
    seed=st.integers(0, 9),
)
def test_speculative_texts_are_autoregressive_ones(
    toy: Transformer, tiny: Transformer, lengths, positions, span, stop, options, batch_size, sampling, is_trained, seed
) -> None:
    model = toy if is_trained else tiny
    generator = np.random.default_rng(seed)
    prompts = [Prompt(tuple(generator.integers(3, 50, length).tolist()), None, limit) for length, limit in lengths]
    expected = texts(engine_of(model, Autoregressive(), stop_ids=(stop,)), prompts, sampling=sampling)
    decoder = Speculative(positions=positions, span=span)
    drafted = engine_of(model, decoder, batch_size=batch_size, stop_ids=(stop,), **options)
    assert texts(drafted, prompts, sampling=sampling) == expected


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([8, 16])),
    rope=st.fixed_dictionaries(
        {"factor": st.sampled_from([1.0, 2.5, 16.0]), "original_max_position_embeddings": st.sampled_from([8, 20])},
        optional={
            "truncate": st.booleans(),
            "beta_fast": st.sampled_from([8.0, 32.0]),
            "mscale": st.sampled_from([0.5, 1.0]),
            "mscale_all_dim": st.sampled_from([0.7, 1.0]),
            "attention_factor": st.sampled_from([0.9, 1.3]),
            "llama_4_scaling_beta": st.sampled_from([0.1, 0.7]),
        },
    ),
    seed=st.integers(0, 9),
)
def test_the_network_is_ministral3(tmp_path_factory: pytest.TempPathFactory, shape, rope, seed: int) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    layers, kv_heads, groups, head_dim = shape
    config = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers}
    config |= {"num_attention_heads": kv_heads * groups, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1} | rope}
    config |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    theirs = transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**config, pad_token_id=None, initializer_range=0.3)
    )
    folder = tmp_path_factory.mktemp("ministral")
    named = {"architectures": ["NemotronLabsDiffusionModel"], "mask_token_id": 49, "block_size": 8}
    (folder / "config.json").write_text(json.dumps(config | named | {"rms_norm_eps": theirs.config.rms_norm_eps}))
    ours = {"model.": "encoder.", "lm_head.": "diffusion_head."}
    weights = {
        new + k.removeprefix(old): v
        for k, v in theirs.state_dict().items()
        for old, new in ours.items()
        if k.startswith(old)
    }
    save_file(weights, folder / "model.safetensors")
    ids = torch.randint(49, (30,)).tolist()
    expected = theirs.double()(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    found = plain_logits(load_model(folder, dtype=torch.float64), ids, causal(30))
    assert torch.allclose(found, expected, atol=1e-4)  # theirs turns by angles in float32


@pytest.mark.parametrize("rules", FITTING, ids=lambda rules: "+".join(map(registry.describe, rules)))
def test_rules_run_checked_and_alike_in_batches(tiny: Transformer, rules: tuple) -> None:
    decoder = Denoise(Threshold(0.5, strict=False), rules)
    alone = texts(engine_of(tiny, decoder))
    assert [len(ids) for ids in alone] == [28] * len(PROMPTS)
    assert texts(engine_of(tiny, decoder, batch_size=3)) == alone
    assert texts(engine_of(deepcopy(tiny).float().prepare(), decoder, batch_size=2)) == alone


def test_what_has_nothing_to_act_on_is_refused_in_one_line(tiny: Transformer) -> None:
    for rule, message in (
        ("window", "rule window needs positions that predict the token after them, and here"),
        (
            "partial_commit:settle=1",
            "rule partial_commit lets commits keep keys and values of steps, and here only causal",
        ),
        (
            "suffix_dropout",
            "rule suffix_dropout: sub-blocks of 8 positions and 0 ahead leave none of the block's 8 out",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            engine_of(tiny, Denoise(rules=(parse_rule(rule),)))
    with pytest.raises(UsageError, match="sub-blocks of 4: this model decodes its blocks as a whole"):
        engine_of(tiny, sub_block_size=4)
    with pytest.raises(UsageError, match="the reference estimator shows what follows the first token"):
        next(iter(engine_of(tiny, stop_ids=(2,)).score([ScoreRequest((5,), (6, 7))], estimator="reference")))


def test_sampled_texts_do_not_depend_on_the_batch(tiny: Transformer) -> None:
    for decoder in (Autoregressive(), Denoise(Threshold(0.5, strict=False))):
        alone = texts(engine_of(tiny, decoder), sampling=Sampling(0.8, seed=3))
        assert texts(engine_of(tiny, decoder, batch_size=4), sampling=Sampling(0.8, seed=3)) == alone
        assert texts(engine_of(tiny, decoder), sampling=Sampling(0.8, seed=4)) != alone


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_autoregressive_score_is_the_models_likelihood(tiny: Transformer, batch_size: int) -> None:
    asked = [ScoreRequest(PROMPTS[1], (7, 9, 30)), ScoreRequest(PROMPTS[0], (8,)), ScoreRequest(PROMPTS[0], (9,))]
    for decoder, estimator in ((None, "autoregressive"), (Autoregressive(), "trajectory")):
        found = engine_of(tiny, decoder, batch_size=batch_size).score(asked, estimator=estimator)
        for score, request in zip(sorted(found, key=lambda each: each.index), asked, strict=True):
            ids = [*request.context_ids, *request.continuation_ids]
            chances = plain_logits(tiny, ids, causal(len(ids))).log_softmax(-1)
            places = range(len(request.context_ids) - 1, len(ids) - 1)
            expected = sum(float(chances[place, ids[place + 1]]) for place in places)
            assert score.loglikelihood == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("join", ["on", "off"])
def test_scores_follow_the_trajectory_of_the_models_own_text(tiny: Transformer, join: str) -> None:
    engine = engine_of(tiny, join=join)
    completion = next(iter(engine.generate([PROMPTS[3]], max_new_tokens=21)))
    (score,) = engine.score([ScoreRequest(PROMPTS[3], tuple(completion.ids))])
    steps = [step for step in completion.steps if step.kind in DENOISING]
    assert score.is_greedy
    assert score.steps <= len(steps)  # positions behind the text are masks to the end
    (uncached,) = engine_of(tiny, prefix_cache=False).score([ScoreRequest(PROMPTS[3], tuple(completion.ids))])
    assert uncached.loglikelihood == pytest.approx(score.loglikelihood, abs=1e-9)


ADAPTER = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": ["o_proj"], "lora_dropout": 0.1}


def write_adapter(
    folder: Path, model: Transformer, *, name: str = "o_proj", **entries: object
) -> dict[str, torch.Tensor]:
    """A random adapter, as PEFT writes it."""
    config, tensors = model.config, {}
    torch.manual_seed(2)
    for layer in range(config.layers):
        module = f"base_model.model.encoder.layers.{layer}.self_attn.{name}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(3, config.heads * config.head_dim) / 8
        tensors[f"{module}.lora_B.weight"] = torch.randn(config.hidden, 3) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | entries))
    return tensors


@pytest.mark.parametrize("positions", [0, 24])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_an_adapter_drafts_and_never_verifies(tmp_path: Path, positions: int, precision: torch.dtype) -> None:
    """Drafts are those of merged weights, also in the forward that verifies; the text stays the plain model's."""
    dtypes = (torch.float64, torch.float64, precision)
    plain, merged, ours = (load_model(TESTS / "golden_nld", dtype=dtype) for dtype in dtypes)
    tensors = write_adapter(tmp_path / "lora", plain)
    for layer, each in enumerate(merged.each_layer):
        module = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
        down, up = (tensors[f"{module}.lora_{name}.weight"].double() for name in "AB")
        each.attention.output.weight += 12 / 3 * up @ down
    ours.draft_adapter = read_adapter(tmp_path / "lora", plain.config, dtype=precision, device=torch.device("cpu"))
    events: list[StepEvent] = []
    drafted = engine_of(ours, Speculative(positions=positions, span=8))
    prompts = [(5, 6, 7), tuple(range(10, 30))]
    found = texts(drafted, prompts, on_step=events.append)
    assert found == texts(engine_of(plain, Autoregressive()), prompts)
    mask, compared, differing = plain.config.mask_id, 0, 0
    assert mask is not None
    for event in events:
        prompt, text = prompts[event.sample.index], found[event.sample.index]
        known = event.start + 1  # the last known token is the first that runs
        branches = [(each.accepted, each.tokens) for each in event.branches]
        if event.plan.kind == "draft":
            branches = [(-1, tuple(event.proposed[1:].tolist()))]
        for accepted, tokens in branches:
            agreed = [*prompt, *text][: known + max(accepted, 0)]
            draft = event.tokens[1 : 1 + accepted].tolist() if accepted > 0 else []
            if accepted > 0 and agreed[known:] != draft:
                continue
            width = len(tokens) + 1
            ids = agreed + [mask] * (width if accepted >= 0 else width - 1)
            first = len(agreed) if accepted >= 0 else known - 1
            seen = seeing_itself(first, width)
            logits = literal_adapted(plain, merged, ids, seen, first)
            logits[:, mask] = -torch.inf
            assert tuple(logits.argmax(-1)[first + 1 :].tolist()) == tokens
            without = plain_logits(plain, ids, seen)[first + 1 :]
            without[:, mask] = -torch.inf
            differing += tuple(without.argmax(-1).tolist()) != tokens
            compared += 1
    assert compared > 10
    assert differing > 5


def literal_adapted(
    plain: Transformer, merged: Transformer, ids: list[int], seen: torch.Tensor, first: int
) -> torch.Tensor:
    """Logits where positions from `first` on run the merged weights, and those before it the plain ones."""
    h = plain.embedding(torch.tensor(ids))
    rotation, group = plain.rotations(len(ids)), plain.config.heads // plain.config.kv_heads
    for layer, other in zip(plain.each_layer, merged.each_layer, strict=True):
        q, k, v = layer.attention.project_rotated(h, rotation)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.einsum("qhe,khe->hqk", q, k) / plain.config.head_dim**0.5
        mixed = torch.einsum("hqk,khe->qhe", weights.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(-2)
        h = h + torch.cat((layer.attention.finish(mixed[:first]), other.attention.finish(mixed[first:])))
        h = h + layer.mlp(h)
    return plain.logits(h)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_rslora": True}, "use_rslora True is not supported"),
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"rank_pattern": {"o_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"o_proj": 2}}, "alpha_pattern"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"r": None}, "has no entry 'r'"),
        ({"r": 4}, r"lora_A.weight is F32 \(3, 64\), expected floats of shape \(4, 64\)"),
        ({"name": "q_proj"}, "lacks base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight"),
    ],
)
def test_other_adapters_are_refused_in_one_line(tmp_path: Path, toy: Transformer, entries: dict, message: str) -> None:
    write_adapter(tmp_path / "lora", toy, **entries)
    with pytest.raises(UsageError, match=message) as error:
        read_adapter(tmp_path / "lora", toy.config, dtype=torch.float64, device=torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_the_command_line_takes_an_adapter(
    tmp_path: Path, toy: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "lora", toy)
    command = ["generate", "--model", str(TESTS / "golden_nld"), "--ids", "--prompt", "5 6 7", "--max-new-tokens", "9"]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert "decoded by speculative:positions=auto,span=16,context=causal" in plain.err
    assert main([*command, "--draft-adapter", str(tmp_path / "lora")]) == 0
    assert capsys.readouterr().out == plain.out
    assert main([*command, "--threshold", "0.5"]) == 0
    assert "decoded by block" in capsys.readouterr().err
    assert main([*command, "--decode", "block", "--draft-adapter", str(tmp_path / "lora")]) == 2
    assert "a draft adapter is for speculative decoding, and block drafts nothing" in capsys.readouterr().err


def test_the_8b_builds_on_the_meta_device() -> None:
    """Its published config, without the weights."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
    entries = {"architectures": ["NemotronLabsDiffusionModel"], "vocab_size": 131072, "hidden_size": 4096}
    entries |= {"intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32, "head_dim": 128}
    entries |= {
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }
    entries |= {"block_size": 32, "mask_token_id": 100, "eos_token_id": 11, "bos_token_id": 1, "rope_parameters": rope}
    config = parse_config(
        entries | {"dlm_paradigm": "bidirectional", "torch_dtype": "bfloat16"}, {"eos_token_id": [11, 2]}
    )
    with torch.device("meta"):
        model = Transformer(config)
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert sum(parameter.numel() for parameter in model.parameters()) == 34 * layer + 2 * 131072 * 4096 + 4096
    decoding = resolve_decoding(config)
    assert (decoding.block_size, decoding.mask_id, decoding.stop_ids, decoding.bos_id) == (32, 100, (11, 2), 1)
    table = rotation_table(config.rope, head_dim=128, positions=16385, dtype=torch.float64)
    assert table.query_scale is not None
    assert table.query_scale[[0, 16383, 16384]].tolist() == pytest.approx([1, 1, 1 + 0.1 * math.log(2)])
    assert rotation_table(config.rope, head_dim=128, positions=16384, dtype=torch.float64).query_scale is None
