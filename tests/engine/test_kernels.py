"""The kernels between the matrix multiplications, against the same in torch's operations and double precision."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsaver.engine.backends import backend_for
from stepsaver.engine.backends.cpu import kernels, library
from stepsaver.engine.backends.packed import Attending
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.rope import Rope, Rotation, rotate, rotation_table
from tests.conftest import GOLDEN
from tests.engine.golden_cases import assert_equal_to_reference, decode_case, read_golden

CPU = torch.device("cpu")
built = pytest.mark.skipif(not library.is_loaded(), reason="no compiler when the package was installed")
sizes = st.integers(0, 40)
widths = st.integers(1, 300)
seeds = st.integers(0, 2**32 - 1)


def numbers(seed: int, *shape: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


@built
@settings(max_examples=60, deadline=None)
@given(rows=sizes, width=widths, seed=seeds, spread=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_rows_are_normed(rows: int, width: int, seed: int, spread: float) -> None:
    x = numbers(seed, rows, width, spread=spread)
    weight = numbers(seed + 1, width)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-6).double(), expected, rtol=2e-6, atol=1e-30)


@built
@settings(max_examples=40, deadline=None)
@given(rows=sizes, width=widths, seed=seeds)
def test_a_pending_residual_stays_in_the_rows(rows: int, width: int, seed: int) -> None:
    x, added = numbers(seed, rows, width), numbers(seed + 1, rows, width)
    total = x + added
    weight = numbers(seed + 2, width)
    normed = kernels.rms_norm(x, weight, 1e-6, added)
    assert torch.equal(x, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-6))


@built
@settings(max_examples=60, deadline=None)
@given(rows=sizes, width=widths, seed=seeds, spread=st.sampled_from([0.1, 3.0, 40.0, 200.0]))
def test_activation_is_silu_times_up(rows: int, width: int, seed: int, spread: float) -> None:
    gate_up = numbers(seed, rows, 2 * width, spread=spread)
    gate, up = gate_up.double().chunk(2, -1)
    assert torch.allclose(kernels.silu_product(gate_up).double(), F.silu(gate) * up, rtol=2e-6, atol=1e-30)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Tests have one thread; what several of them might do to each other needs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_slot(slot: int, rows: int) -> torch.Tensor:
    """The first places of a slot."""
    return torch.stack((torch.full((rows,), slot), torch.arange(rows)), 1)


def rotations(rows: int, head_dim: int, seed: int) -> Rotation:
    table = rotation_table(Rope(theta=100.0), head_dim=head_dim, positions=50, dtype=torch.float32)
    return table[torch.randint(50, (rows,), generator=torch.Generator().manual_seed(seed))]


@built
@settings(max_examples=60, deadline=None)
@given(rows=sizes, heads=st.integers(0, 6), kv_heads=st.integers(1, 3), half=st.integers(1, 40), seed=seeds)
def test_rows_are_rotated_and_stored_where_they_belong_and_nowhere_else(
    rows: int, heads: int, kv_heads: int, half: int, seed: int
) -> None:
    """Queries and keys are rotated in place, values are not; keys and values go to shuffled places of a cache."""
    slots, capacity = 3, 48
    x = numbers(seed, rows, heads + 2 * kv_heads, 2 * half)
    rotation = rotations(rows, 2 * half, seed)
    turned = torch.cat((rotate(x[:, : heads + kv_heads], rotation), x[:, heads + kv_heads :]), 1)
    chosen = np.random.default_rng(seed).permutation(slots * capacity)[:rows]
    slot, position = chosen // capacity, chosen % capacity
    stored = torch.zeros(slots, 2 * kv_heads, capacity, 2 * half)
    expected = stored.clone()
    expected[slot, :, position] = turned[:, heads:]
    places = torch.from_numpy(np.stack((slot, position), 1))
    assert kernels.attend(x.view(rows, (heads + 2 * kv_heads) * 2 * half), rotation, stored, places, None) is None
    assert torch.allclose(x, turned, atol=1e-5)
    assert torch.allclose(stored, expected, atol=1e-5)
    assert torch.equal(stored == 0, expected == 0)


@built
@settings(max_examples=30, deadline=None)
@given(rows=sizes, heads=st.integers(1, 4), kv_heads=st.integers(1, 2), half=st.integers(1, 70), seed=seeds)
def test_heads_are_normed_before_they_are_rotated(rows: int, heads: int, kv_heads: int, half: int, seed: int) -> None:
    """Queries and keys by weights of their own; values stay as they are."""
    width = 2 * half
    x, weight = numbers(seed, rows, heads + 2 * kv_heads, width), numbers(seed + 1, 2 * width, spread=1.0)
    rotation = rotations(rows, width, seed)
    norm = lambda part, which: F.rms_norm(part.double(), (width,), which.double(), 1e-6).float()  # noqa: E731
    queries, keys, values = x.split_with_sizes((heads, kv_heads, kv_heads), 1)
    expected = torch.cat(
        (rotate(norm(queries, weight[:width]), rotation), rotate(norm(keys, weight[width:]), rotation), values), 1
    )
    stored = torch.zeros(1, 2 * kv_heads, rows, width)
    projected = x.flatten(1)
    kernels.attend(projected, rotation, stored, in_slot(0, rows), None, kernels.Norms(weight, 1e-6))
    assert torch.allclose(projected, expected.flatten(1), atol=1e-4, rtol=1e-4)
    assert torch.allclose(stored[0].transpose(0, 1), expected[:, heads:], atol=1e-4, rtol=1e-4)


@built
@settings(max_examples=30, deadline=None)
@given(rows=sizes, width=widths, seed=seeds)
def test_rows_are_copied_to_their_places_and_nowhere_else(rows: int, width: int, seed: int) -> None:
    x, stored = numbers(seed, rows, width), numbers(seed + 1, 50, width)
    places = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:rows]
    expected = stored.index_copy(0, places, x)
    with threads(4):
        kernels.copy_rows(x, stored, places)
    assert torch.equal(stored, expected)


@built
@pytest.mark.parametrize("index", [-1, 3, 1 << 62, -(1 << 63)])
def test_rows_outside_a_tensor_are_refused(index: int) -> None:
    stored = numbers(0, 3, 5)
    before = stored.clone()
    with pytest.raises(IndexError, match="outside the tensor that it is for"):
        kernels.copy_rows(numbers(1, 2, 5), stored, torch.tensor([0, index]))
    assert torch.equal(stored, before)


@built
@pytest.mark.parametrize(
    ("place", "segment"),
    [
        *(((slot, position), None) for slot, position in [(-1, 0), (2, 0), (0, -1), (0, 8), (1 << 60, 0)]),
        *((None, (*each, 4, 0, 0)) for each in [(0, 3, 0), (1, 0, 0), (-1, 1, 0), (0, 2, 2), (0, 2, -1)]),
        *(
            (None, (0, 2, 0, *each))
            for each in [(9, 0, 0), (-1, 0, 0), (0, 0, 0), (4, -1, 2), (4, 3, 2), (4, 0, 5), (4, 0, 4)]
        ),
    ],
)
def test_places_and_segments_outside_a_cache_are_refused(
    place: tuple[int, int] | None, segment: tuple[int, ...] | None
) -> None:
    """Of two rows in two slots of eight positions, one head each."""
    projected, stored = numbers(0, 2, 8 if place is None else 24), numbers(1, 2, 2, 8, 8)
    places = None if place is None else torch.tensor([(0, 0), place])
    segments = None
    if segment is not None:
        start, stop, slot, *view = segment
        segments = Attending(torch.tensor([(start, stop, slot)]), torch.tensor([view] * 2), (), (), None, None)
    before = projected.clone(), stored.clone()
    with pytest.raises(IndexError, match="outside the tensor that it is for"):
        kernels.attend(projected, rotations(2, 8, 0), stored, places, segments)
    assert torch.equal(projected, before[0])
    assert torch.equal(stored, before[1])


@built
@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 33), min_size=1, max_size=4), group=st.integers(1, 3), seed=seeds)
def test_rows_attend_to_what_the_same_call_stores(counts: list[int], group: int, seed: int) -> None:
    """Attention begins when all rows are in the cache, whichever thread puts them there: as in two calls."""
    kv_heads, width = 2, 16
    rows = sum(counts)
    projected = numbers(seed, rows, kv_heads * (group + 2) * width, spread=1.0)
    rotation = rotations(rows, width, seed)
    ends = np.cumsum(counts)
    segments = attending(
        [(end - n, end, slot, [(n, 0, 0)] * n) for slot, (n, end) in enumerate(zip(counts, ends, strict=True))]
    )
    places = torch.cat([in_slot(slot, n) for slot, n in enumerate(counts)])
    together = torch.zeros(len(counts), 2 * kv_heads, 40, width)
    apart = together.clone()
    with threads(4):
        mixed = kernels.attend(projected.clone(), rotation, together, places, segments)
    query_width = kv_heads * group * width
    kernels.attend(projected[:, query_width:].contiguous(), rotation, apart, places, None)
    assert torch.equal(together, apart)
    expected = kernels.attend(projected[:, :query_width].contiguous(), rotation, apart, None, segments)
    assert mixed is not None
    assert torch.equal(mixed, expected)


@built
@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(
        st.tuples(
            st.integers(1, 33), st.integers(1, 90) | st.sampled_from([478, 480]), st.integers(0, 1), st.integers(0, 50)
        ),
        min_size=1,
        max_size=5,
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    width=st.sampled_from([8, 16, 24, 64, 256]),
    seed=seeds,
)
def test_attention_is_that_of_each_sample_alone(
    samples: list[tuple[int, int, int, int]], kv_heads: int, group: int, width: int, seed: int
) -> None:
    """Of ragged samples in shuffled slots of a larger cache, against plain softmax attention in double precision.

    With a growth of 1 each row sees one key more than the one before it: causal rows. Every other row has a gap.
    """
    slots = np.random.default_rng(seed).permutation(len(samples) + 1)[: len(samples)]
    stored = numbers(seed, len(samples) + 1, 2 * kv_heads, 512, width, spread=1.0)
    rows = sum(each[0] for each in samples)
    projected = numbers(seed + 1, rows, kv_heads * group * width, spread=2.0)
    rotation = rotations(rows, width, seed)
    queries = rotate(projected.unflatten(1, (-1, width)), rotation)
    described, expected, start = [], [], 0
    for (count, length, growth, gap), slot in zip(samples, slots.tolist(), strict=True):
        seen = length + growth * torch.arange(count)
        gaps = torch.tensor([[0, 0], [3, min(3 + gap, length)]])[torch.arange(count) % 2 * int(length > 3)]
        described.append((start, start + count, slot, torch.cat((seen[:, None], gaps), 1).tolist()))
        q = queries[start : start + count].double().unflatten(1, (kv_heads, group))
        keys, values = stored[slot].double().chunk(2, 0)
        places = torch.arange(512)
        unseen = (places >= seen[:, None]) | ((places >= gaps[:, :1]) & (places < gaps[:, 1:]))
        scores = torch.einsum("nkge,kle->nkgl", q, keys) / width**0.5
        weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
        expected.append(torch.einsum("nkgl,kle->nkge", weights, values).flatten(1, 2))
        start += count
    mixed = kernels.attend(projected, rotation, stored, None, attending(described))
    assert mixed is not None
    assert torch.allclose(mixed.double(), torch.cat(expected).flatten(1), atol=2e-5)


@built
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), group=st.integers(1, 3), length=st.integers(1, 56), growth=st.integers(0, 1), seed=seeds
)
def test_a_query_is_mixed_bit_for_bit_alike_alone_and_among_others(
    rows: int, group: int, length: int, growth: int, seed: int
) -> None:
    kv_heads, width = 2, 24
    stored = numbers(seed, 1, 2 * kv_heads, 96, width, spread=1.0)
    projected = numbers(seed + 1, rows, kv_heads * group * width)
    rotation = rotations(rows, width, seed)
    views = [(length + row * growth, 0, min(row % 3, length - 1)) for row in range(rows)]
    mixed = kernels.attend(projected.clone(), rotation, stored, None, attending([(0, rows, 0, views)]))
    assert mixed is not None
    for row in range(0, rows, 3):
        one = slice(row, row + 1)
        segment = attending([(0, 1, 0, views[one])])
        alone = kernels.attend(projected[one].clone(), rotation[torch.tensor([row])], stored, None, segment)
        assert alone is not None
        assert torch.equal(alone[0], mixed[row])


@built
@pytest.mark.parametrize(
    ("segment", "view"),
    [
        ((0, 2, 2), (3, 0, 0)),
        ((0, 2, -1), (3, 0, 0)),
        ((0, 3, 0), (3, 0, 0)),
        ((1, 1, 0), (3, 0, 0)),
        ((0, 2, 0), (0, 0, 0)),
        ((0, 2, 0), (33, 0, 0)),
        ((0, 2, 0), (3, -1, 0)),
        ((0, 2, 0), (3, 2, 1)),
        ((0, 2, 0), (3, 1, 4)),
        ((0, 2, 0), (3, 0, 3)),
    ],
)
def test_what_lies_outside_the_cache_is_refused(segment: tuple[int, int, int], view: tuple[int, int, int]) -> None:
    stored = torch.zeros(2, 2, 32, 16)
    outside = Attending(torch.tensor([segment]), torch.tensor([view] * 2), (), (), None, None)
    with pytest.raises(IndexError):
        kernels.attend(torch.ones(2, 3 * 16), rotations(2, 16, 0), stored, None, outside)


@built
@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 20), width=st.integers(2, 300), data=st.data(), seed=seeds)
def test_most_likely_is_the_first_best_but_the_mask(rows: int, width: int, data: st.DataObject, seed: int) -> None:
    mask = data.draw(st.integers(-1, width - 1))
    logits = numbers(seed, rows, width).round(decimals=1)  # with ties
    allowed = logits.clone()
    if mask >= 0:
        allowed[:, mask] = -torch.inf
    best = [row.index(max(row)) for row in allowed.tolist()]
    chosen = kernels.argmax(logits, mask)
    assert chosen[0].tolist() == best
    probabilities = logits.double().softmax(-1)[range(rows), best]
    assert torch.allclose(chosen[1], probabilities, rtol=1e-5)
    assert torch.allclose(chosen[2], logits.double().sum(-1), atol=1e-3)


@built
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = wrong
    for result in (kernels.rms_norm(x, torch.ones(64), 1e-6), kernels.silu_product(x)):
        assert not torch.isfinite(result[1]).all()
        assert torch.isfinite(result[[0, 2]]).all()
    assert torch.isfinite(kernels.argmax(x, 3)[2]).tolist() == [True, False, True]


@built
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x = numbers(0, 300, 2 * 576)  # enough for several threads
    for kernel in (kernels.silu_product, lambda rows: kernels.rms_norm(rows, torch.ones(2 * 576), 1e-6)):
        with threads(4):
            whole = kernel(x)
        assert all(torch.equal(kernel(x[row : row + 1])[0], whole[row]) for row in range(0, 300, 37))


@pytest.mark.skipif(os.environ.get("STEPSAVER_KERNELS") == "0", reason="kernels are switched off")
def test_kernels_are_built_where_there_is_a_compiler() -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    assert library.problem is None


@built
@pytest.mark.parametrize(
    ("where", "wrong"), [("queries", "nan"), ("queries", "inf"), ("keys", "nan"), ("values", "inf")]
)
def test_attention_hides_nothing_that_is_not_finite(where: str, wrong: str) -> None:
    projected, stored = torch.ones(2, 3 * 16), torch.ones(1, 2, 32, 16)
    if where == "queries":
        projected[0, 16 + 3] = float(wrong)
    else:
        stored[0, 0 if where == "keys" else 1, 5, 3] = float(wrong)
    segments = attending([(0, 1, 0, [(20, 0, 0)]), (1, 2, 0, [(5, 0, 0)])])
    mixed = kernels.attend(projected, rotations(2, 16, 0), stored, None, segments)
    assert mixed is not None
    assert not torch.isfinite(mixed[0, 16:32]).all()
    assert torch.isfinite(mixed[1]).all(), "whoever does not see it is not touched"


@built
def test_kernels_serve_single_precision_on_the_cpu_alone() -> None:
    assert backend_for(torch.float32, CPU).has_kernels
    for dtype, device in ((torch.float64, CPU), (torch.bfloat16, CPU), (torch.float32, torch.device("cuda"))):
        assert not backend_for(dtype, device).has_kernels


halved = pytest.mark.skipif(not library.multiplies_blocks(), reason="no multiplication by 16-bit weights here")


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    padded = torch.zeros(-(-outputs // library.BLOCK) * library.BLOCK, inputs, dtype=torch.float16)
    padded[:outputs] = weight
    return padded.unflatten(0, (-1, library.BLOCK)).transpose(1, 2).contiguous()


@halved
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 45) | st.sampled_from([57, 280, 281, 300]),  # widened weights; more passes than one block takes
    inputs=st.integers(1, 300) | st.sampled_from([143, 144, 145, 289, 1025]),
    outputs=st.integers(1, 140),
    with_bias=st.booleans(),
    seed=seeds,
)
def test_halves_are_multiplied_row_by_row_and_nothing_beside_is_touched(
    rows: int, inputs: int, outputs: int, with_bias: bool, seed: int
) -> None:
    """Against double precision, bit for bit alike for a row alone; from strided rows into columns of a wider tensor."""
    weight = numbers(seed, outputs, inputs, spread=0.1).half()
    bias = numbers(seed + 1, outputs) if with_bias else None
    x = numbers(seed + 2, rows, inputs + 3)[:, :inputs]
    out = torch.full((rows, outputs + 4), 7.0)
    with threads(4):
        kernels.multiply(x, in_blocks(weight), bias, out[:, 2:-2])
    assert (out[:, :2] == 7.0).all()
    assert (out[:, -2:] == 7.0).all()
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().t() + (0.0 if bias is None else bias.double().abs())
    assert ((out[:, 2:-2] - exact).abs() <= 2e-6 * terms).all()
    for row in range(0, rows, 4):
        alone = torch.empty(1, outputs)
        kernels.multiply(x[row : row + 1], in_blocks(weight), bias, alone)
        assert torch.equal(alone[0], out[row, 2:-2])


@halved
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_halves_hide_nothing_that_is_not_finite(wrong: float) -> None:
    x = torch.ones(20, 40)
    x[3, 17] = wrong
    out = torch.empty(20, 40)
    kernels.multiply(x, in_blocks(torch.ones(40, 40).half()), None, out)
    assert not torch.isfinite(out[3]).any()
    assert torch.isfinite(out[torch.arange(20) != 3]).all()


@pytest.mark.parametrize(
    ("setting", "served"),
    [("0", False), pytest.param("plain", True, marks=built), pytest.param("avx2", True, marks=built)],
)
def test_decoding_equals_the_reference_with_fewer_kernels_too(setting: str, served: bool) -> None:
    """Without any, and with those of a processor that has no wide instructions."""
    script = (
        "from stepsaver.engine.backends.cpu.backend import CPU; "
        "from tests.engine.test_kernels import decode_golden; "
        f"assert CPU.has_kernels is {served}; decode_golden()"
    )
    ran = run_with_kernels(setting, script)
    assert ran.returncode == 0, ran.stderr


@built
@pytest.mark.parametrize("width", [8, 16, 24, 32, 64])
def test_attention_is_the_same_with_narrower_vectors(width: int) -> None:
    """As on a processor without AVX-512, whose sums are taken in another order."""
    mixed = mix_numbers(width)
    script = f"from tests.engine.test_kernels import mix_numbers\nprint(mix_numbers({width}).double().tolist())"
    ran = run_with_kernels("avx2", script)
    assert ran.returncode == 0, ran.stderr
    assert torch.allclose(torch.tensor(json.loads(ran.stdout)), mixed, rtol=1e-5, atol=1e-6)


def attending(segments: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]]]]) -> Attending:
    """Samples by start, stop, slot and what each of their queries sees."""
    views = [view for *_, each in segments for view in each]
    return Attending(torch.tensor([each[:3] for each in segments]), torch.tensor(views), (), (), None, None)


def mix_numbers(width: int) -> torch.Tensor:
    """Queries of two heads in two samples: three rows that see 45 rows, and one that sees 17."""
    stored = numbers(2, 2, 4, 64, width, spread=1.0)
    segments = attending([(0, 3, 0, [(45, 0, 0)] * 3), (3, 4, 1, [(17, 0, 0)])])
    mixed = kernels.attend(numbers(3, 4, 4 * width, spread=1.0), rotations(4, width, 0), stored, None, segments)
    assert mixed is not None
    return mixed


def run_with_kernels(setting: str, script: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"STEPSAVER_KERNELS": setting, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def decode_golden() -> None:
    model = load_model(GOLDEN, dtype=torch.float32)
    for case in read_golden(GOLDEN)["cases"][:4]:
        assert_equal_to_reference(case, decode_case(model, case))


@halved
def test_halves_are_multiplied_by_narrower_vectors_too() -> None:
    """As on a processor without AVX-512: bit for bit the same sums, two vectors for one."""
    weight, x = numbers(0, 70, 600, spread=0.1).half(), numbers(1, 20, 600)
    out = torch.empty(20, 70)
    kernels.multiply(x, in_blocks(weight), None, out)
    script = (
        "import torch; from stepsaver.engine.backends.cpu import kernels\n"
        "from tests.engine.test_kernels import in_blocks, numbers\n"
        "out = torch.empty(20, 70)\n"
        "kernels.multiply(numbers(1, 20, 600), in_blocks(numbers(0, 70, 600, spread=0.1).half()), None, out)\n"
        "print(out.double().tolist())"
    )
    ran = run_with_kernels("avx2", script)
    assert ran.returncode == 0, ran.stderr
    assert torch.equal(torch.tensor(json.loads(ran.stdout), dtype=torch.float64), out.double())
