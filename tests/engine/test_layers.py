"""Layers that run in one call: every number is the one of the operations by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsaver.engine.backends.cpu import backend, layers, library
from stepsaver.engine.backends.cpu.layers import run_layers
from stepsaver.engine.cache import DeltaCache, KeyValueCache
from stepsaver.engine.forward import Memory, StepOutput, run_step
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import LayerPositions, whole_plan
from stepsaver.engine.positions import position_set, positions_between
from tests.conftest import tiny_config

CPU = torch.device("cpu")
stacked = pytest.mark.skipif(not library.multiplies_blocks(), reason="no multiplication by blocks here")


@contextmanager
def without_stack(model: Transformer) -> Iterator[None]:
    """Layer by layer, part by part."""
    kept = model.packed_layers
    model.__dict__["packed_layers"] = None
    try:
        yield
    finally:
        model.__dict__["packed_layers"] = kept


def small_model(shape: dict, *, halves: bool, seed: int = 0) -> Transformer:
    stored = torch.float16 if halves else torch.float32
    return random_model(tiny_config(**shape), dtype=torch.float32, stored=stored, seed=seed)


def run(
    model: Transformer,
    samples: list[tuple[int, int]],
    *,
    kept: frozenset[int] = frozenset(),
    reads: int = 1,
    seen: int | None = None,
    probes: frozenset[int] = frozenset(),
    reused: tuple[int, int, int] = (0, 0, 0),
    frozen: int = 0,
) -> tuple[StepOutput, list[torch.Tensor]]:
    """One forward of samples that have some rows after some context, and the caches after it. A row sees the others up
    to the end of its block of `seen` rows. In the `kept` layers some rows reuse the attention's delta, their keys and
    values, and the MLP's delta; in the others some rows keep only their keys and values.
    """
    capacity, block, slots = library.LONGEST_CONTEXT + 32, max(rows for _, rows in samples), len(samples)
    cache = KeyValueCache(model.config, slots=slots, capacity=capacity, dtype=torch.float32, device=CPU)
    cache.stored.copy_(torch.randn(cache.stored[:, :1].shape, generator=torch.Generator().manual_seed(1)))
    deltas = DeltaCache(model.config, layers=kept, slots=slots, block_size=block, dtype=torch.float32, device=CPU)
    deltas.stored.fill_(7.0)
    steps = []
    for slot, (context, rows) in enumerate(samples):
        window = positions_between(0, rows)
        read = position_set(np.arange(rows) % reads == rows % reads)
        plan = whole_plan("sub", window=window, reads=read, layers=model.config.layers)
        attention, keys_values, mlp = reused
        layers = tuple(
            LayerPositions(each.attention & ~attention, each.keys_values & ~keys_values, each.mlp & ~mlp)
            if layer in kept
            else each._replace(keys_values=each.keys_values & ~frozen)
            for layer, each in enumerate(plan.layers)
        )
        plan = replace(plan, layers=layers)
        tokens = np.random.default_rng(context).integers(3, model.config.vocab, rows)
        steps.append(Step(slot, context, tokens, seen or block, plan))
    memory = Memory(cache, deltas if kept else None, model.rotations(capacity), probes)
    return run_step(model, memory, steps), [cache.stored, deltas.stored]


shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 4),
        "hidden": st.sampled_from((8, 32, 40, 100)),
        "kv_heads": st.sampled_from((1, 2)),
        "heads": st.sampled_from((4, 8)),  # queries fill whole blocks of a weight: otherwise there is no stack
        "head_dim": st.sampled_from((8, 16, 24)),
        "mlp": st.sampled_from((5, 48, 160)),
        "qkv_bias": st.booleans(),
        "output_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "head_norms": st.booleans(),
    }
)

some_rows = st.sampled_from((0, (1 << 32) - 1)) | st.integers(0, (1 << 32) - 1)


@stacked
@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    halves=st.booleans(),
    samples=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 32)), min_size=1, max_size=7),
    threads=st.integers(1, 3),
    kept=st.frozensets(st.integers(0, 3)),
    reads=st.integers(1, 5),
    seen=st.sampled_from((None, 1, 5, 8)),
    is_large=st.booleans(),
    probes=st.frozensets(st.integers(0, 3)),
    reused=st.tuples(*[some_rows] * 3),
    frozen=some_rows,
)
def test_one_call_gives_the_numbers_of_many(
    shape: dict,
    halves: bool,
    samples: list[tuple[int, int]],
    threads: int,
    kept: frozenset[int],
    reads: int,
    seen: int | None,
    is_large: bool,
    probes: frozenset[int],
    reused: tuple[int, int, int],
    frozen: int,
) -> None:
    model = small_model(shape, halves=halves)
    assert model.packed_layers is not None
    assert not model.packed_layers.is_large
    model.packed_layers.is_large = is_large  # how the work is shared, whatever the size: by rows, or by columns
    kept = frozenset(layer for layer in kept if layer < model.config.layers)
    given = {"kept": kept, "reads": reads, "seen": seen, "probes": probes & kept, "reused": reused, "frozen": frozen}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        once, caches = run(model, samples, **given)
        with without_stack(model):
            apart, caches_apart = run(model, samples, **given)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(once.logits, apart.logits)
    assert all(map(torch.equal, caches, caches_apart))
    assert (once.drift is None) == (apart.drift is None)
    assert once.drift is None or torch.equal(once.drift.nan_to_num(-1), apart.drift.nan_to_num(-1))
    assert once.executed == apart.executed


LARGE = tiny_config(hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1000, layers=3)


@stacked
def test_models_in_double_precision_and_large_ones_in_float32_have_no_stack() -> None:
    assert random_model(tiny_config(), dtype=torch.float64).packed_layers is None
    assert random_model(LARGE, dtype=torch.float32).packed_layers is None


@stacked
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("samples", [[(0, 1)], [(40, 8)], [(3, 14)], [(64, 32), (7, 5), (0, 32), (90, 1)]])
def test_large_layers_share_every_product(samples: list[tuple[int, int]], threads: int) -> None:
    model = random_model(LARGE, dtype=torch.float32, stored=torch.float16)
    assert model.packed_layers is not None
    assert model.packed_layers.is_large
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        once, caches = run(model, samples, kept=frozenset({0, 2}), reads=3)
        with without_stack(model):
            apart, caches_apart = run(model, samples, kept=frozenset({0, 2}), reads=3)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(once.logits, apart.logits)
    assert all(map(torch.equal, caches, caches_apart))
    assert once.executed == apart.executed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first layer of each call of the kernels that ran, and the one after its last."""
    made: list[tuple[int, int]] = []

    def recorded(packed: object, span: range, *given: object) -> object:
        going = run_layers(packed, span, *given)  # type: ignore[arg-type]
        made.extend([] if going is None else [(span.start, span.stop)])
        return going

    monkeypatch.setattr(backend, "run_layers", recorded)
    return made


@stacked
def test_the_kernel_is_called_once_for_all_layers_that_run_the_same_rows(calls: list[tuple[int, int]]) -> None:
    model = small_model({"layers": 4}, halves=True)
    run(model, [(3, 8), (9, 4)])
    assert calls == [(0, 3), (3, 4)]
    calls.clear()
    run(model, [(3, 8), (9, 4)], reads=3)
    assert calls == [(0, 3), (3, 4)], "the last layer too, where fewer rows go on"
    calls.clear()
    run(model, [(library.LONGEST_CONTEXT, 8)])
    assert not calls, "a context that another kernel attends"


@stacked
def test_layers_of_which_some_rows_reuse_deltas_run_in_one_call_too(calls: list[tuple[int, int]]) -> None:
    model = small_model({"layers": 8}, halves=True)
    run(model, [(3, 8), (9, 4)], kept=frozenset(range(1, 6)), reused=(0b1010, 0, 0b1010))
    assert calls == [(0, 1), (1, 6), (6, 7), (7, 8)]
    calls.clear()
    run(model, [(3, 8)], kept=frozenset({6, 7}), reads=3, reused=(0b1010, 0b1010, 0b1010))
    assert calls == [(0, 6), (6, 7)], "the last layer does not: fewer rows go on there"


@stacked
def test_layers_whose_drift_is_measured_run_in_a_call_of_their_own(calls: list[tuple[int, int]]) -> None:
    model = small_model({"layers": 8}, halves=True)
    every, probes = frozenset(range(8)), frozenset({0, 3, 4})
    once, caches = run(model, [(3, 8), (9, 4)], kept=every, probes=probes)
    assert calls == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]
    with without_stack(model):
        apart, caches_apart = run(model, [(3, 8), (9, 4)], kept=every, probes=probes)
    assert once.drift is not None
    assert apart.drift is not None
    assert torch.equal(once.drift, apart.drift)
    assert torch.equal(once.logits, apart.logits)
    assert all(map(torch.equal, caches, caches_apart))


@stacked
def test_layers_that_reuse_deltas_while_their_drift_is_measured_run_part_by_part(calls: list[tuple[int, int]]) -> None:
    model = small_model({"layers": 6}, halves=True)
    run(model, [(3, 8)], kept=frozenset(range(1, 5)), probes=frozenset({2, 3}), reused=(0b1010, 0, 0b1010))
    assert calls == [(0, 1), (1, 2), (4, 5), (5, 6)]


@stacked
def test_rows_may_keep_their_keys_and_values_in_layers_whose_deltas_nobody_keeps(calls: list[tuple[int, int]]) -> None:
    """No rule here does, but one of another package may, beside one that reuses deltas."""
    model = small_model({"layers": 6}, halves=True)
    run(model, [(3, 8)], kept=frozenset({2, 3}), reused=(0b1010, 0, 0b1010), frozen=0b11)
    assert calls == [(2, 4)]


@stacked
@pytest.mark.parametrize("limit", ["slots", "capacity", "rows", "delta_rows"])
def test_an_index_that_does_not_fit_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is smaller than the call's indices say: caches, rows of the forward, rows of the deltas."""

    def lessened(given: library.LayersCall) -> object:
        setattr(given, limit, 1)
        return library.byref(given)

    model = small_model({"layers": 4}, halves=True)
    monkeypatch.setattr(layers, "byref", lessened)
    reused = {"kept": frozenset(range(1, 4)), "reused": (0b1010, 0, 0b1010)} if limit == "delta_rows" else {}
    with pytest.raises(IndexError, match="outside the tensor that it is for"):
        run(model, [(3, 8), (9, 4)], **reused)  # type: ignore[arg-type]


@stacked
def test_without_memory_for_it_layers_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model({}, halves=True)
    expected, caches = run(model, [(5, 8)])
    monkeypatch.setattr(backend, "run_layers", lambda *_: None)
    found, caches_after = run(model, [(5, 8)])
    assert torch.equal(found.logits, expected.logits)
    assert all(map(torch.equal, caches, caches_after))
    assert found.executed == expected.executed


@stacked
def test_a_row_does_not_depend_on_its_mates() -> None:
    model = small_model({"hidden": 96, "head_dim": 16}, halves=True)
    samples = [(11, 8), (40, 3), (0, 32), (7, 1), (64, 13), (5, 5)]
    together = run(model, samples)[0].logits
    alone = torch.cat([run(model, [each])[0].logits for each in samples])
    assert torch.equal(together, alone)


@stacked
def test_a_copy_has_a_stack_of_its_own() -> None:
    model = small_model({}, halves=True)
    expected = run(model, [(5, 8)])[0].logits
    copy = deepcopy(model)
    addresses = set(model.packed_layers.addresses.flatten().tolist())  # type: ignore[union-attr]
    assert addresses & set(copy.packed_layers.addresses.flatten().tolist()) == {0}  # type: ignore[union-attr]
    del model
    assert torch.equal(run(copy, [(5, 8)])[0].logits, expected)
