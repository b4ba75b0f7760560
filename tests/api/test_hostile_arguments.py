"""Whatever is given to the public functions, what is wrong is one line of `stepsaver.UsageError`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepsaver

NOT_NUMBERS: list[Any] = [None, "x", "1", [1], {}, b"1"]
NOT_WHOLE: list[Any] = [*NOT_NUMBERS, 1.5, float("nan"), True]
OUT_OF_RANGE: list[Any] = [-1, 2**70, -(2**70)]
NOT_TRUTHS: list[Any] = [None, "no", 1, 0.0, []]
NOT_RULES: list[Any] = [None, 5, {"trim": 1}, [None], [5], "x", ["trim:x=1"], b"trim", [["trim"]], ["\ud800"]]
NOT_NAMES: list[Any] = [5, b"x", ["x"], "x", "", "\ud800", "x" * 5000, "\x00", 1.5, True]
NOT_RECIPES: list[Any] = [5, b"x", [], 1.5, True, "no such file", "", "\x00"]

LOADING: dict[str, list[Any]] = {
    "revision": [5, b"main", []],
    "device": [None, *NOT_NAMES, "meta", "cuda:99", "cpu:-1"],
    "dtype": [None, *NOT_NAMES, "int8"],
    "weights": [None, *NOT_NAMES],
    "block_size": [*NOT_WHOLE[1:], *OUT_OF_RANGE, 0],
    "sub_block_size": [*NOT_WHOLE[1:], *OUT_OF_RANGE, 0, 3],
    "mask_id": [*NOT_WHOLE[1:], *OUT_OF_RANGE],
    "stop_ids": [5, "1", [None], ["x"], [1.5], [-1], [2**70], b"1", {1: 2}],
    "prefix_cache": NOT_TRUTHS,
    "block_cache": NOT_TRUTHS,
    "join": [None, *NOT_NAMES],
}
GENERATING: dict[str, list[Any]] = {
    "prompts": [
        None, 5, [None], [5, None], [[1.5]], [["x"]], [[2**70]], [[-1]], [[True]], b"ab", [b"ab"], "\ud800", ["\ud800"],
        {"a": 1}, [{"prompt": "a"}], [[1, None]], "x" * 100_000, [[5] * 100_000], 1.5,
    ],
    "rules": NOT_RULES,
    "policy": [5, [], "x", b"threshold", "threshold:threshold=nan", True, "\ud800"],
    "threshold": [*NOT_NUMBERS[1:], float("nan"), 2.0, -1.0, True, 10**400],
    "batch_size": [*NOT_WHOLE[1:], -1, 0],
    "recipe": NOT_RECIPES,
    "max_new_tokens": [*NOT_WHOLE, *OUT_OF_RANGE],
    "temperature": [*NOT_NUMBERS, float("nan"), float("inf"), -1.0, True, 10**400],
    "top_p": [*NOT_NUMBERS, float("nan"), 0.0, 1.5, True],
    "seed": [*NOT_WHOLE, 2**70, -(2**70)],
    "chat": NOT_TRUTHS,
    "ids": NOT_TRUTHS,
    "details": NOT_TRUTHS,
    "n": [*NOT_WHOLE[1:], *OUT_OF_RANGE, 0, 2],
    "top_k": [*NOT_WHOLE[1:], *OUT_OF_RANGE, 0],
    "stop": [None, 5, [5], "", ["a", ""], b"a", {"a": 1}, ["a", None]],
}  # fmt: skip
SCORING: dict[str, list[Any]] = {
    "pairs": [
        None, 5, "ab", [5], [None], [("a",)], [("a", "b", "c")], [(1, 2)], [("a", [1])], [(None, None)], [("a", None)],
        [("\ud800", "a")], [([1.5], [1])], [([1], [2**70])], [([1], [-1])], [{"context": "a"}], b"ab",
        [({1}, {2})],
    ],
    "rules": NOT_RULES,
    "batch_size": [*NOT_WHOLE[1:], -1, 0],
    "recipe": NOT_RECIPES,
    "estimator": [None, *NOT_NAMES],
    "score_stop": NOT_TRUTHS,
    "chat": NOT_TRUTHS,
}  # fmt: skip


def shown(value: Any) -> str:
    return ascii(value)[:30]


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{n}-{shown(value)}")
        for name, values in table.items()
        for n, value in enumerate(values)
    ]


def complaint(call: Callable[[], object]) -> str:
    with pytest.raises(stepsaver.UsageError) as raised:
        call()
    message = str(raised.value)
    assert message
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(("name", "value"), cases(LOADING))
def test_loading(tiny_folder: Path, name: str, value: Any) -> None:
    complaint(lambda: stepsaver.load(tiny_folder, **{name: value}))


@pytest.mark.parametrize(
    "name", [None, 5, b"x", "", "missing", "x" * 5000, "\x00", "\ud800", "/dev/null", "/", 1.5], ids=shown
)
def test_names_of_models(name: Any) -> None:
    complaint(lambda: stepsaver.load(name))


@pytest.mark.parametrize(("name", "value"), cases(GENERATING))
def test_generating(tiny: stepsaver.Model, name: str, value: Any) -> None:
    given = {"prompts": "ab", "max_new_tokens": 4} | {name: value}
    complaint(lambda: tiny.generate(given.pop("prompts"), **given))


@pytest.mark.parametrize(("name", "value"), cases(SCORING))
def test_scoring(tiny: stepsaver.Model, name: str, value: Any) -> None:
    given = {"pairs": [("a", "b")]} | {name: value}
    complaint(lambda: tiny.score(given.pop("pairs"), **given))


@pytest.mark.parametrize("text", [None, 5, b"x", ["x"], "\ud800"], ids=shown)
def test_encoding(tiny: stepsaver.Model, text: Any) -> None:
    complaint(lambda: tiny.encode(text))


@pytest.mark.parametrize("ids", [None, 5, "x", ["x"], [1.5], [-1], [2**70], [None], b"x", [True]], ids=shown)
def test_decoding(tiny: stepsaver.Model, ids: Any) -> None:
    complaint(lambda: tiny.decode(ids))
