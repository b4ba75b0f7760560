"""What a forward costs: reading between the points, files, measuring, and what it predicts. No test depends on time."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepsaver.bench.timings import predicted_seconds
from stepsaver.engine import curve as curve_module
from stepsaver.engine.curve import Curve, Scratch, measure_curve, read_curve
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import ForwardRecord, LayersRun, SampleStep, Trace
from tests.conftest import straight_curve, tiny_config

BENT = Curve("made up", "float32", 2, "small", 1, (1, 2, 4), (0, 100), ((10.0, 11.0, 15.0), (20.0, 21.0, 26.0)))


@pytest.mark.parametrize(
    ("positions", "context", "seconds"),
    [
        (1, 0, 10.0),
        (4, 100, 26.0),
        (3, 0, 13.0),  # between 11 and 15
        (2, 50, 16.0),  # between 11 and 21
        (3, 50, 18.25),
        (6, 0, 19.0),  # two more a position, as from 2 to 4
        (2, 200, 31.0),  # ten more for a hundred tokens
        (6, 200, 43.0),
        (0.25, 0, 10.0),  # a forward costs what one of a single position does
    ],
)
def test_between_points_and_beyond_them_on_the_line(positions: float, context: float, seconds: float) -> None:
    assert BENT.seconds(positions, context) == pytest.approx(seconds)


def test_one_context_stands_for_all() -> None:
    assert replace(BENT, contexts=(64,), table=BENT.table[:1]).seconds(3, 1000) == 13.0


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    steps = [[draw(st.floats(1e-3, 1e3)) for _ in range(4)] for _ in range(3)]
    table = np.cumsum(np.cumsum(steps, axis=0), axis=1)
    return replace(BENT, positions=(1, 8, 32, 33), contexts=(0, 64, 512), table=tuple(map(tuple, table.tolist())))


@given(curves(), *[st.floats(0, 2000)] * 3)
def test_more_positions_or_context_never_take_less(curve: Curve, one: float, other: float, third: float) -> None:
    few, many = sorted((one, other))
    slack = 1 + 1e-9
    assert curve.seconds(few, third) <= curve.seconds(many, third) * slack
    assert curve.seconds(third, few) <= curve.seconds(third, many) * slack


@given(curves())
def test_a_curve_survives_its_file(curve: Curve) -> None:
    assert Curve.from_json(json.loads(json.dumps(curve.as_json()))) == curve


@pytest.mark.parametrize(
    "damage",
    [
        {"device": 5},
        {"threads": "2"},
        {"batch_size": 1.5},
        {"positions": []},
        {"positions": [1]},
        {"positions": [0, 1, 2]},
        {"positions": [1, 4, 2]},
        {"contexts": [0]},
        {"contexts": [-1, 100]},
        {"contexts": 7},
        {"table": [[10, 11, 15], [20, 21]]},
        {"table": [[10, 11, 15], [20, 21, float("nan")]]},
        {"table": [[0, 11, 15], [20, 21, 26]]},
        {"table": [[10, 11, 9], [20, 21, 26]]},
        {"table": [[10, 11, 15], [20, 9, 26]]},
        {"table": [["x", 11, 15], [20, 21, 26]]},
        {"table": None},
    ],
    ids=str,
)
def test_a_damaged_file_is_one_line(damage: dict, tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(BENT.as_json()))
    assert read_curve(path) == BENT
    path.write_text(json.dumps(BENT.as_json() | damage))
    with pytest.raises(UsageError, match=r"curve\.json is no curve of what forwards cost \(") as caught:
        read_curve(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000], ids=lambda it: it[:3])
def test_what_is_no_curve_at_all_is_one_line_too(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"curve\.json is no curve"):
        read_curve(tmp_path / "curve.json")


@pytest.mark.parametrize(
    ("changes", "batch_size", "positions", "contexts"),
    [
        ({"max_positions": 4096}, 1, [1, 2, 4, 8, 16, 32, 64], [0, 128, 384]),
        ({"max_positions": 200}, 16, [1, 2, 4, 8, 16, 32, 64, 128], [0, 128]),
        ({"max_positions": 16, "layers": 1}, 1, [1, 2, 4, 8, 16, 32, 64], [0]),
        ({"block_size": 1, "max_positions": 16}, 3, [1, 2, 4, 8, 16, 32, 64], [0]),
        ({"predicts": "self", "max_positions": 16}, 2, [1, 2, 4, 8, 16, 32, 64], [0]),
    ],
)
def test_what_is_timed_is_what_was_meant(
    changes: dict, batch_size: int, positions: list, contexts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards that take what their positions and contexts say, with a disturbance of one in four."""
    count = 0

    def seconds(self: Scratch, positions: int, context: int) -> float:
        nonlocal count
        count += 1
        assert real(self, positions, context) > 0
        return 5.0 + positions + context / 128 + 100 * (count % 4 == 0)

    real = Scratch.seconds
    monkeypatch.setattr(Scratch, "seconds", seconds)
    monkeypatch.setattr(curve_module, "SECONDS", 0.0)
    model, said = random_model(tiny_config(**changes), dtype=torch.float64), []
    curve = measure_curve(model, batch_size=batch_size, say=said.append)
    assert (list(curve.positions), list(curve.contexts)) == (positions, contexts)
    assert count == 4 * len(positions) * len(contexts)  # a warm-up and three rounds
    assert len(said) == 1
    assert said[0].startswith("note: measured what a forward costs here, in ")
    assert curve.is_of(model, batch_size)
    assert not curve.is_of(model, batch_size + 1)
    assert not replace(curve, threads=curve.threads + 1).is_of(model, batch_size)


def test_a_forward_of_the_scratch_has_the_positions_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, int]]] = []

    def execute(batch, scheduled):  # type: ignore[no-untyped-def]
        seen.append([(step.plan.positions, step.step.start) for step in scheduled])
        return real(batch, scheduled)

    real = curve_module.execute
    monkeypatch.setattr(curve_module, "execute", execute)
    model = random_model(tiny_config(), dtype=torch.float64)
    scratch = Scratch(model, resolve_decoding(model.config), slots=2, context=8, positions=64)
    for positions, context in ((1, 8), (2, 0), (16, 8), (64, 8)):
        scratch.seconds(positions, context)
    assert seen == [[(1, 8)], [(1, 0)] * 2, [(8, 8)] * 2, [(32, 8)] * 2]


def test_disturbed_figures_are_evened_out() -> None:
    table = curve_module._evened_out([[1.0, 9.0, 2.0, 12.0], [0.5, 10.0, 11.0, 11.0]])
    assert table == ((0.75, 5.5, 5.5, 11.5), (0.75, 10.0, 11.0, 11.5))


LAYERS = 3


def entry(rows: int, *, sample: int = 0, before: int = 0, runs: int = LAYERS) -> SampleStep:
    """All positions in some of the layers; all of them are read."""
    return SampleStep(
        sample=sample,
        kind="sub" if rows else "reused",
        step=1,
        step_in_sub_block=1,
        rows=rows,
        first_position=0,
        context=before + rows,
        attention_run=runs * rows,
        attention_reused=(LAYERS - runs) * rows,
        keys_values_run=runs * rows,
        mlp_run=runs * rows,
        mlp_reused=(LAYERS - runs) * rows,
        head_rows=rows,
        unmasked=1,
    )


def record(*entries: SampleStep, layers: int = LAYERS) -> ForwardRecord:
    ran = layers if any(each.rows for each in entries) else 0
    return ForwardRecord(1.0, 1.0, LayersRun(ran, ran, ran), entries, 0)


CONFIG = tiny_config(layers=LAYERS)
STRAIGHT = straight_curve(10.0, 2.0, 0.125)


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        (record(entry(8)), 26.0),
        (record(entry(8, before=40)), 31.0),
        (record(entry(8, before=40), entry(24, sample=1, before=80)), 10 + 64 + 70 / 8),  # (8 * 40 + 24 * 80) / 32
        (record(entry(0)), 0.0),
        (record(entry(0), entry(8)), 26.0),
        (record(entry(8)._replace(recomputed_context=24)), 26.0 + 58.0),
    ],
)
def test_a_forward_is_predicted_by_its_positions_and_their_contexts(made: ForwardRecord, seconds: float) -> None:
    assert predicted_seconds(STRAIGHT, CONFIG, [made]) == pytest.approx(seconds)
    assert predicted_seconds(STRAIGHT, CONFIG, [made, made]) == pytest.approx(2 * seconds)


def test_layers_that_nothing_runs_are_not_there_and_other_reuse_is_so_many_positions_less() -> None:
    whole = predicted_seconds(STRAIGHT, CONFIG, [record(entry(32))])
    empty = predicted_seconds(STRAIGHT, CONFIG, [record(entry(32, runs=1), layers=1)])
    some = predicted_seconds(STRAIGHT, CONFIG, [record(entry(32, runs=1), layers=3)])
    assert (whole - 10) / 3 + 10 / 3 < empty < some < whole  # the head is left
    assert some - empty == pytest.approx(10 * 2 / 3)  # the forward's own cost, of two layers


def decoded(model: Transformer, *rules: str) -> Trace:
    trace = Trace()
    decoding = resolve_decoding(model.config, sub_block_size=4)
    decoder = Denoise(parse_policy("fixed"), tuple(map(parse_rule, rules)))
    engine = Engine(model, decoder=decoder, batch_size=2, decoding=decoding)
    list(engine.generate([[5, 6, 7], [8] * 11, [9]], max_new_tokens=24, trace=trace))
    return trace


def test_less_work_takes_less_unless_positions_are_free(tiny_model: Transformer) -> None:
    plain, window = decoded(tiny_model), decoded(tiny_model, "window:refresh=block")
    assert len(window.records) == len(plain.records)
    config = tiny_model.config
    for curve, saves in ((STRAIGHT, True), (straight_curve(10.0, 0.0), False)):
        ours, base = (predicted_seconds(curve, config, trace.records) for trace in (window, plain))
        assert (ours < base - 1e-9) is saves
