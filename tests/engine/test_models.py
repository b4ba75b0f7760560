"""Checkpoint folders of every kind that loads, against transformers, and everything that can be wrong with one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepsaver.engine.backends import backend_for
from stepsaver.engine.backends.cpu.weights import Packed
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.machine import choose_dtype
from stepsaver.engine.models import architecture, linear
from stepsaver.engine.models.architecture import Architecture, architectures
from stepsaver.engine.models.config import parse_config, read_config
from stepsaver.engine.models.linear import Linear
from stepsaver.engine.models.load import load_model, random_model, save_weights
from stepsaver.engine.models.rope import Rope, rotate, rotation_table
from stepsaver.engine.models.transformer import Transformer
from tests.conftest import GOLDEN, tiny_config
from tests.engine.test_score import plain_logits

SHAPE = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 3,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
NEMOTRON = "NemotronLabsDiffusionModel"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("Qwen2", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
        ("Qwen3", {"num_key_value_heads": 3, "head_dim": 8, "attention_bias": True}),
        ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
        ("Llama", {"num_key_value_heads": 3, "head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
        ("Qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN}),
        (
            "Qwen3",
            {
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rope_parameters": YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
            },
        ),
        ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
        ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.4, "mscale": 0.7, "mscale_all_dim": 1.3}}),
        ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "original_max_position_embeddings": 8}}),
    ],
)
def test_autoregressive_families_equal_transformers(tmp_path: Path, family: str, changes: dict) -> None:
    """A checkpoint that transformers wrote decodes, with blocks of one row, to what transformers generates from it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **changes, initializer_range=0.5)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float64)
    engine = Engine(ours, decoding=resolve_decoding(ours.config, stop_ids=()))
    prompt = [5, 17, 40, 8, 63]
    ids = next(iter(engine.generate([prompt], max_new_tokens=40))).ids
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    assert ids == expected[0, len(prompt) :].tolist()


LLADA = Architecture(
    name="LLaDAModelLM",
    attention_bias=False,
    output_bias=False,
    mask_id=None,
    block_size=1,
    predicts="self",
    entries={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
        "hidden_act": "activation_type",
    },
    modules={
        "model.embed_tokens": "model.transformer.wte",
        "model.layers": "model.transformer.blocks",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    },
)


@pytest.mark.parametrize("tied", [True, False])
def test_an_architecture_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """A checkpoint in LLaDA's names, where entries and tensors are called otherwise, beside a literal evaluation."""
    monkeypatch.setattr(architecture, "_own", lambda: {LLADA.name: LLADA})
    hidden, heads, kv_heads, mlp, vocab, layers = 24, 4, 2, 40, 31, 2
    config = {"architectures": ["LLaDAModelLM"], "d_model": hidden, "n_heads": heads, "n_kv_heads": kv_heads}
    config |= {"n_layers": layers, "mlp_hidden_size": mlp, "vocab_size": vocab, "max_sequence_length": 64}
    config |= {"rope_theta": 500.0, "rms_norm_eps": 1e-5, "weight_tying": tied, "activation_type": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kv_width = hidden // heads * kv_heads
    shapes = {"wte": (vocab, hidden), "ln_f": (hidden,), "ff_out": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"blocks.{layer}.{name}": (hidden,) for name in ("attn_norm", "ff_norm")}
        shapes |= {f"blocks.{layer}.{name}": (hidden, hidden) for name in ("q_proj", "attn_out")}
        shapes |= {f"blocks.{layer}.{name}": (kv_width, hidden) for name in ("k_proj", "v_proj")}
        shapes |= {f"blocks.{layer}.{name}": (mlp, hidden) for name in ("ff_proj", "up_proj")}
        shapes |= {f"blocks.{layer}.ff_out": (hidden, mlp)}
    torch.manual_seed(4)
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    if tied:
        weights["ff_out"] = weights["wte"].clone()
    save_file({f"model.transformer.{k}.weight": v for k, v in weights.items()}, tmp_path / "model.safetensors")
    ids = torch.tensor([5, 17, 3, 30, 30, 8])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    size = hidden // heads
    angles = torch.outer(torch.arange(6.0, dtype=torch.float64), 500.0 ** (-torch.arange(0.0, size, 2) / size).double())

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, size)).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        spun = torch.complex(*split(x).chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((spun.real, spun.imag), -1)

    h = weights["wte"][ids]
    for layer in range(layers):
        at = {name.split(".")[-1]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        x = norm(h, f"blocks.{layer}.attn_norm")
        repeats = heads // kv_heads
        queries, keys = turned(x @ at["q_proj"].T), turned(x @ at["k_proj"].T).repeat_interleave(repeats, 0)
        values = split(x @ at["v_proj"].T).repeat_interleave(repeats, 0)
        mixed = (queries @ keys.transpose(1, 2) / size**0.5).softmax(-1) @ values
        h = h + mixed.transpose(0, 1).flatten(1) @ at["attn_out"].T
        x = norm(h, f"blocks.{layer}.ff_norm")
        h = h + (torch.nn.functional.silu(x @ at["ff_proj"].T) * (x @ at["up_proj"].T)) @ at["ff_out"].T
    expected = norm(h, "ln_f") @ weights["ff_out"].T

    model = load_model(tmp_path, dtype=torch.float64)
    assert (model.head.weight is model.embedding.weight) == tied
    found = plain_logits(model, ids.tolist(), torch.ones(6, 6, dtype=torch.bool))
    assert torch.allclose(found, expected, atol=1e-9)
    (tmp_path / "model.safetensors").unlink()
    save_file(
        {f"model.transformer.{k}.weight": v for k, v in weights.items() if k != "ln_f"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UsageError, match=r"lacks 1 tensors: model.transformer.ln_f.weight"):
        load_model(tmp_path, dtype=torch.float64)


def test_shards_with_an_index_load_like_one_file(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole, sharded = (load_model(folder, dtype=torch.float32).state_dict() for folder in (GOLDEN, tmp_path))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_survive_writing_and_reading(tmp_path: Path, tied: bool) -> None:
    shutil.copy(GOLDEN / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = random_model(read_config(tmp_path), dtype=torch.float32)
    save_weights(model, tmp_path / "model.safetensors", dtype=torch.float32)
    again = load_model(tmp_path, dtype=torch.float32)
    assert (again.head.weight is again.embedding.weight) == tied
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])


def test_the_7b_model_builds_on_the_meta_device(shared: Path) -> None:
    config = read_config(shared / "fast_dllm_v2_7b")
    with torch.device("meta"):
        model = Transformer(config)
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (28, 3584, 28, 4)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(7.6e9, rel=0.01)
    decoding = resolve_decoding(config)
    assert (decoding.mask_id, decoding.block_size, decoding.stop_ids[0]) == (151665, 32, 151645)


def _folder(tmp_path: Path, **config_changes: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text()) | config_changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen1ForCausalLM"]}, "unknown architecture 'Qwen1ForCausalLM'; nearest: Qwen3ForCausalLM"),
        ({"architectures": []}, "expected exactly one"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"num_key_value_heads": 4}, "cannot share"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope' is not supported; known: default, lin",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}},
            "beta_slow 2 is not below beta_fast 1",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention', and only"),
        ({"architectures": [NEMOTRON], "dlm_paradigm": "autoregressive"}, "dlm_paradigm 'autoregressive' is not supp"),
        ({"architectures": [NEMOTRON], "sliding_window": 4096}, "sliding_window 4096 is not supported, only null"),
        ({"hidden_size": None}, "no entry 'hidden_size'"),
        ({"num_hidden_layers": 13}, "has 13 layers, the weights have 12"),
        ({"num_hidden_layers": 11}, "has 11 layers, the weights have 12"),
        ({"intermediate_size": 64}, r"misshapen tensors: model.layers.0.mlp.down_proj.weight is \(48, 128\)"),
    ],
)
def test_wrong_configurations_are_one_line(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        load_model(_folder(tmp_path, **changes), dtype=torch.float32)
    assert "\n" not in str(error.value)


def test_damaged_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model folder"):
        load_model(tmp_path / "absent", dtype=torch.float32)
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_model(tmp_path, dtype=torch.float32)
    folder = _folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UsageError, match="damaged or cut short"):
        load_model(folder, dtype=torch.float32)
    weights.unlink()
    (folder / "forward.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle is never read")
    with pytest.raises(UsageError, match=r"no \*.safetensors"):
        load_model(folder, dtype=torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        load_model(folder, dtype=torch.float32)


def test_mask_and_stop_ids_come_from_the_nearest_source() -> None:
    plain = {"architectures": ["Fast_dLLM_QwenForCausalLM"], **SHAPE, "vocab_size": 152064}
    config = parse_config(plain, {})
    assert resolve_decoding(config).mask_id == 151665
    assert resolve_decoding(config, mask_id=9).mask_id == 9
    assert resolve_decoding(parse_config(plain | {"mask_token_id": 7}, {})).mask_id == 7
    assert config.stop_ids == (2,)
    assert parse_config(plain, {"eos_token_id": [4, 5]}).stop_ids == (4, 5)
    assert resolve_decoding(config, stop_ids=(8,)).stop_ids == (8,)
    llama = parse_config(plain | {"architectures": ["LlamaForCausalLM"]}, {})
    assert resolve_decoding(llama).block_size == 1
    with pytest.raises(UsageError, match="need a mask token"):
        resolve_decoding(llama, block_size=8)
    with pytest.raises(UsageError, match="blocks of 1 positions need a mask token"):
        resolve_decoding(replace(llama, predicts="self"), block_size=1)


def test_rotation_is_that_of_complex_numbers() -> None:
    table = rotation_table(Rope(theta=100.0), head_dim=8, positions=5, dtype=torch.float64)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    angles = torch.outer(torch.arange(5.0, dtype=torch.float64), 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(rotate(x, table), torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_multiply_like_plain_ones(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LARGE", 1)
    layer = Linear(40, 96, bias=bias)
    x = torch.randn(7, 40)
    with torch.inference_mode():
        plain = [layer.project(x), layer.project(x, (0, 32)), layer.project(x, (32, 96))]
        layer.prepare(backend_for(torch.float32, torch.device("cpu")), (0, 32), (32, 96), weights="float32")
        if not isinstance(layer.packed, Packed):
            pytest.skip("this build of torch packs no weights")
        packed = [layer.project(x), layer.project(x, (0, 32)), layer.project(x, (32, 96))]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, packed, strict=True))
    assert layer.weight is None, "the packed weight is the only one"


def test_a_packed_model_decodes_the_golden_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.golden_cases import assert_equal_to_reference, decode_case, read_golden

    monkeypatch.setattr(linear, "LARGE", 1)
    model = load_model(GOLDEN, dtype=torch.float32)
    case = read_golden(GOLDEN)["cases"][3]
    assert_equal_to_reference(case, decode_case(model, case))


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_every_dtype_decodes(name: str) -> None:
    model = random_model(tiny_config(), dtype=choose_dtype(name, torch.device("cpu")))
    engine = Engine(model, decoding=resolve_decoding(model.config, stop_ids=()))
    assert len(next(iter(engine.generate([(5, 6, 7)], max_new_tokens=12))).ids) == 12


def test_auto_dtype_on_the_cpu_is_float32_and_unknown_ones_are_refused() -> None:
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(UsageError, match="float8"):
        choose_dtype("float8", torch.device("cpu"))


def test_old_cards_take_float16_and_refuse_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro RTX 6000")
    for capability, chosen in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert choose_dtype("auto", card) == chosen
        if chosen == torch.bfloat16:
            assert choose_dtype("bfloat16", card) == chosen
        else:
            with pytest.raises(UsageError, match=r"^Quadro RTX 6000 has no bfloat16 .*: use float16$"):
                choose_dtype("bfloat16", card)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("planted", "named"),
    [("model.norm.weight", "norm.weight"), ("model.layers.1.self_attn.k_proj.bias", "layers.1.attention.qkv.bias")],
)
def test_numbers_that_float16_does_not_hold_are_refused(
    stored: torch.dtype, planted: str, named: str, tmp_path: Path
) -> None:
    shutil.copy(GOLDEN / "config.json", tmp_path)
    tensors = {name: each.to(stored) for name, each in load_file(GOLDEN / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(tmp_path, dtype=torch.float16)
    tensors[planted].view(-1)[-1] = -1e5
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path, dtype=torch.bfloat16).get_parameter(named).min() < -9e4
    with pytest.raises(UsageError, match=f"^{named} has numbers that float16 does not hold"):
        load_model(tmp_path, dtype=torch.float16)


def test_every_architecture_is_registered_under_its_own_name() -> None:
    autoregressive = {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"}
    assert set(architectures()) == {"Fast_dLLM_QwenForCausalLM", "SDARForCausalLM", NEMOTRON} | autoregressive
