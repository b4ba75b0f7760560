"""Weights in 16 bits: checkpoints of every precision give the tokens of double precision, nothing is rounded unsaid,
and a model takes no more memory than its file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stepsaver.engine.backends.cpu.backend import CPU
from stepsaver.engine.backends.cpu.weights import Floats, Halves, Packed, halves_problem, keep_halves
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models import linear
from stepsaver.engine.models.linear import Kept, Linear
from stepsaver.engine.models.load import load_model, random_model, save_weights
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.rules.rule import Rule
from stepsaver.evaluation.open_model import open_model
from tests.conftest import GOLDEN, sharpened, tiny_config
from tests.engine.golden_cases import decode_case, read_golden
from tests.engine.test_reuse import ACTING_SETS, PROMPTS, engine_of, generate, named

served = pytest.mark.skipif(halves_problem() is not None, reason=f"no weights in 16 bits here: {halves_problem()}")
STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SLICES = {"whole": (), "aligned": ((0, 64), (64, 96)), "within a block": ((0, 40), (40, 96))}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def write_checkpoint(folder: Path, stored: torch.dtype, *, tied: bool = False, mixed: bool = False) -> Path:
    """A small model that knows nothing but is sure of it, with heads whose slices do not end where blocks do."""
    config = tiny_config(tied=tied)
    model = sharpened(random_model(config, dtype=torch.float32, seed=5))
    described = {
        "architectures": [config.architecture],
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.mlp,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": tied,
        "bd_size": config.block_size,
        "mask_token_id": config.mask_id,
        "eos_token_id": list(config.stop_ids),
    }
    (folder / "config.json").write_text(json.dumps(described))
    path = folder / "model.safetensors"
    save_weights(model, path, dtype=stored)
    if mixed:
        tensors = load_file(path)
        chosen = [name for name in tensors if "layers.1." in name or "k_proj" in name]
        save_file(tensors | {name: tensors[name].float() * 1.001 for name in chosen}, path)
    return folder


def tokens(model: Transformer, rules: tuple[Rule, ...] = ()) -> list[list[int]]:
    return [each.ids for each in generate(engine_of(model, rules, batch_size=3), list(PROMPTS), 30)]


@served
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", [*STORED, "mixed"])
def test_every_kind_of_checkpoint_gives_the_tokens_of_double_precision(
    tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, STORED.get(kind, torch.bfloat16), tied=tied, mixed=kind == "mixed")
    expected = tokens(load_model(folder, dtype=torch.float64))
    monkeypatch.setattr(linear, "LARGE", 1)
    auto, single = (load_model(folder, dtype=torch.float32, weights=each) for each in ("auto", "float32"))  # type: ignore[arg-type]
    assert tokens(auto) == tokens(single) == expected
    assert single.kept == Kept(full=single.kept.full)
    share = auto.kept.float16 / single.kept.full
    assert share == {"float32": 0.0, "float16": 1.0, "bfloat16": 1.0}.get(kind, share)
    assert 0.3 < share < 0.9 or kind != "mixed", "maps that hold one tensor of more bits stay in float32"


@served
@pytest.mark.parametrize("rules", [(), *ACTING_SETS], ids=named)
def test_every_rule_gives_the_tokens_of_double_precision(
    half_models: tuple[Transformer, Transformer], rules: tuple[Rule, ...]
) -> None:
    double, half = half_models
    assert tokens(half, rules) == tokens(double, rules)


@pytest.fixture(scope="module")
def half_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Transformer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("half"), torch.float16)
    half = load_model(folder, dtype=torch.float32, weights="float16")
    assert half.kept.full == 0
    return load_model(folder, dtype=torch.float64), half


@served
def test_golden_prompts_decode_alike_with_both_kinds_of_weights(tmp_path: Path) -> None:
    """The golden checkpoint holds float32 numbers; rounded to 16 bits once, all ways of keeping them agree."""
    (tmp_path / "config.json").write_text((GOLDEN / "config.json").read_text())
    tensors = {name: tensor.half() for name, tensor in load_file(GOLDEN / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    kinds = [
        load_model(tmp_path, dtype=torch.float64),
        load_model(tmp_path, dtype=torch.float32, weights="float32"),
        load_model(tmp_path, dtype=torch.float32, weights="float16"),
    ]
    for case in read_golden(GOLDEN)["cases"]:
        expected, *others = ([each.ids for each in decode_case(model, case)] for model in kinds)
        assert all(other == expected for other in others)


@served
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 1200),
    slices=st.sampled_from(sorted(SLICES)),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_halves_multiply_in_single_precision(rows: int, inputs: int, slices: str, bias: bool, seed: int) -> None:
    layer = Linear(inputs, 96, bias=bias)
    weight = numbers(96, inputs, seed=seed).half()
    layer.weight.data = weight
    layer.requires_grad_(False)
    x = numbers(rows, 2 * inputs, seed=seed + 1)[:, ::2].contiguous() * 50
    exact = x.double() @ weight.double().t() + (layer.bias.double() if bias else 0.0)
    bound = (x.double().abs() @ weight.double().abs().t()).max() + 1.0 if rows else 1.0  # the bias is below 1
    layer.prepare(CPU, *SLICES[slices], weights="float16")
    for columns in ((0, 96), *SLICES[slices]):
        found = layer.project(x, columns)
        assert found.is_contiguous()
        assert ((found.double() - exact[:, slice(*columns)]).abs() <= 2e-6 * bound).all()
    if slices == "whole":
        assert isinstance(layer.packed, Halves)
        assert torch.equal(layer.packed.look_up(torch.arange(96)), weight.float())


@served
def test_every_number_of_float16_is_multiplied_exactly() -> None:
    """Subnormal ones too, by rows that pick one number each."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    weight = finite[: len(finite) // 64 * 64].view(-1, 64)
    kept = keep_halves(weight, None, ())
    assert kept is not None
    assert torch.equal(kept.project(torch.eye(64), (0, len(weight))).t(), weight.float())


@pytest.mark.parametrize(
    ("plant", "is_held", "rounded"),
    [
        (0.5, True, 0),
        (65504.0, True, 0),
        (65536.0, False, 0),
        (float("nan"), False, 0),
        (float("inf"), False, 0),
        (2.0**-17, True, 0),
        (1.01 * 2.0**-24, True, 1),
        (1e-12, True, 1),
        (0.1, False, 0),  # as float32: ten bits of its fraction are not enough
    ],
)
@served
@pytest.mark.parametrize("place", [0, 700])
def test_float16_holds_what_it_may_and_nothing_else(plant: float, is_held: bool, rounded: int, place: int) -> None:
    weight = numbers(40, 24).to(torch.bfloat16).float()
    weight[weight.abs() < 1e-4] = 0.25
    weight.view(-1)[place] = plant
    kept = keep_halves(weight, None, ())
    assert (kept is not None) == is_held
    if kept is not None:
        assert kept.rounded == rounded
        assert (kept.look_up(torch.arange(40)) - weight).abs().max() <= 2.0**-25


@served
def test_a_weight_of_nothing_but_tiny_numbers_is_not_held() -> None:
    """Each is off by less than 3e-8, but that is all there is of them."""
    assert keep_halves((numbers(8, 8) * 1e-5).to(torch.bfloat16), None, ()) is None


@served
def test_how_many_numbers_are_rounded_is_said() -> None:
    model = random_model(tiny_config(), dtype=torch.float32, weights="float16", stored=torch.bfloat16)
    exact = random_model(tiny_config(), dtype=torch.float64, stored=torch.bfloat16)
    maps = [
        parameter for name, parameter in exact.named_parameters() if parameter.dim() > 1 and "embedding" not in name
    ]
    rounded = sum(int((each.half().double() != each).sum()) for each in maps)
    assert model.kept == Kept(float16=sum(each.numel() for each in maps), rounded=rounded)
    assert rounded > 0


@served
def test_small_weights_lie_in_blocks_and_double_precision_stays_as_it_is() -> None:
    kinds = {
        (torch.float32, torch.float16): Halves,
        (torch.float32, torch.float32): Floats,
        (torch.float64, torch.float16): type(None),
    }
    for (dtype, stored), layout in kinds.items():
        model = random_model(tiny_config(), dtype=dtype, stored=stored)
        maps = [module for module in model.modules() if isinstance(module, Linear)]
        assert all(isinstance(each.packed, layout) for each in maps)
        assert all(each.weight is not None for each in maps), "they are small, and can be prepared again"


@served
def test_large_weights_are_there_once() -> None:
    config = tiny_config(hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=1024, vocab=1024, tied=True, layers=1)
    kinds = {"auto": Halves, "float32": Packed}
    for weights, layout in kinds.items():
        model = random_model(config, dtype=torch.float32, weights=weights, stored=torch.float16)  # type: ignore[arg-type]
        large = [model.head, model.layers[0].mlp.gate_up, model.layers[0].mlp.down]  # type: ignore[union-attr]
        assert all(isinstance(each.packed, layout) and each.weight is None for each in large)  # type: ignore[union-attr]
        left = {
            name: parameter.dtype for name, parameter in model.named_parameters() if parameter.numel() >= linear.LARGE
        }
        assert left == ({} if weights == "auto" else {"embedding.weight": torch.float16})
        ids = torch.tensor([0, 31, 32, 1023])
        again = random_model(config, dtype=torch.float64, stored=torch.float16)
        assert torch.equal(model.embedding(ids).double(), again.embedding(ids))
        assert model.embedding(ids).dtype == model.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"dtype": torch.float32, "weights": "float16"},
            r"does not hold the numbers of a weight of 64 x 32",
            marks=served,
        ),
        ({"dtype": torch.float64, "weights": "float16"}, r"for float32 arithmetic on a CPU, not for torch.float64"),
        ({"dtype": torch.float32, "weights": "float8"}, r"unknown kind of weights 'float8'"),
    ],
)
def test_wrong_weights_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        random_model(tiny_config(), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "dtype", "expected"),
    [
        ("auto", "float32", "auto"),
        ("float16", "float32", "float16"),
        ("float32", "float32", "float32"),
        ("auto", "float64", "float32"),
    ],
)
@served
def test_the_kind_that_serves_is_known_before_a_weight_is_read(weights: str, dtype: str, expected: str) -> None:
    """A run's identity holds it."""
    opened = open_model("embedded", weights=weights, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    assert opened.weights == expected
    kept = opened.load().kept
    assert (kept.float16 > 0) == (expected != "float32"), "float16 holds the embedded model's weights"


@pytest.mark.parametrize("setting", ["0", "plain"])
def test_machines_without_the_kernel_keep_float32_and_say_so(setting: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, torch.float16)
    script = (
        "import torch, sys, pathlib; from stepsaver.engine.models import linear; linear.LARGE = 1\n"
        "from stepsaver.engine.models.load import load_model\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "from stepsaver.engine.backends.cpu.weights import halves_problem\n"
        "assert halves_problem()\n"
        "assert load_model(folder, dtype=torch.float32).kept.float16 == 0\n"
        "load_model(folder, dtype=torch.float32, weights='float16')"
    )
    ran = run_script(script, str(tmp_path), STEPSAVER_KERNELS=setting)
    assert "weights float16 are not available here (" in ran.stderr.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@served
@pytest.mark.parametrize(("stored", "tied"), [("float16", True), ("bfloat16", False)])
def test_a_model_takes_its_files_size_and_fifteen_per_cent(tmp_path: Path, stored: str, tied: bool) -> None:
    """At its peak, while it is read, by what the process holds more than before."""
    written = run_script(WRITE_LARGE, str(tmp_path), stored, str(int(tied)))
    assert written.returncode == 0, written.stderr
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 190e6
    ran = run_script(READ_LARGE, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    peak, after = map(int, ran.stdout.split())
    assert after <= 1.05 * size
    assert peak <= 1.15 * size


WRITE_LARGE = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
from stepsaver.engine.models.load import stored_tensors
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.models.config import read_config
folder, stored, tied = pathlib.Path(sys.argv[1]), getattr(torch, sys.argv[2]), bool(int(sys.argv[3]))
(folder / "config.json").write_text(json.dumps({
    "architectures": ["Fast_dLLM_QwenForCausalLM"], "num_hidden_layers": 24, "hidden_size": 576,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 24576,
    "max_position_embeddings": 512, "tie_word_embeddings": tied, "mask_token_id": 1}))
with torch.device("meta"):
    model = Transformer(read_config(folder))
tensors = {each.name: torch.randn(each.shape).mul_(0.02).to(stored)
           for parts in stored_tensors(model).values() for each in parts}
save_file(tensors, folder / "model.safetensors")
"""

READ_LARGE = """
import gc, pathlib, sys, torch
from stepsaver.engine.models.load import load_model, random_model
from tests.conftest import tiny_config
random_model(tiny_config(), dtype=torch.float32)  # what the first use of torch takes is not the model's
folder = pathlib.Path(sys.argv[1])
def status(entry):
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(entry))
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
model = load_model(folder, dtype=torch.float32)
assert model.kept.full == 0
gc.collect()
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])} | environment
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=own, capture_output=True, text=True, check=False
    )
