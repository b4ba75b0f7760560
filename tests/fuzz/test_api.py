"""Whatever the public functions are given, the call answers or says in one line what is wrong: 2,000 tries that are
always the same ones, and 20,000 others in the long campaign. Small models, few tokens: a try takes milliseconds.
"""

import decimal
import fractions
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepsaver
from stepsaver.engine.policies.quota import Quota
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.trim import Trim
from tests.evaluation.tiny_folder import write_model_folder
from tests.fuzz.words import VALUES, registry_texts

LONGEST_MESSAGE = 1200


class ManyLines:
    def __repr__(self) -> str:
        return "one\ntwo\x1b[2J"


class Unspeakable:
    """Nothing can be asked of it while it is an argument."""

    is_argument = False

    def __repr__(self) -> str:
        if Unspeakable.is_argument:
            raise KeyError("no\nname")
        return "Unspeakable()"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else RuntimeError(name)


class LikeAnInt(int):
    def __repr__(self) -> str:
        return "a\nb"


NUMBERS: list[Any] = [
    0, 1, 2, 3, 4, -1, 255, 2**31, 2**63, 2**64 - 1, -(2**63), 10**30, 10**400, True, False, LikeAnInt(2),
    0.0, 0.5, 0.9, 1.0, 1.5, -0.5, 1e-310, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"),
    fractions.Fraction(1, 2), decimal.Decimal("0.5"), 1j,
    *(kind(value) for kind in (np.int8, np.uint8, np.int64, np.uint64) for value in (0, 1, 2, 100)),
    np.uint64(2**64 - 1), np.int64(-1), np.uint8(200), np.float16(0.5), np.float32(0.9), np.float64(1e-310),
    np.bool_(True), np.array(2), np.array(0.5), np.array([2]), np.array([[1, 2]]), np.array("x"), np.float64("nan"),
    torch.tensor(2), torch.tensor(0.5), torch.tensor(True), torch.tensor([2]), torch.tensor([[1, 2], [3, 4]]),
    torch.tensor(float("nan")), torch.tensor(2, dtype=torch.uint8), torch.empty(0),
]  # fmt: skip
THINGS: list[Any] = [
    None, "", "x", "a\nb", "\ud800", "\x00", b"x", bytearray(b"x"), [], (), {}, set(), {1}, [None], ["x"], [[]],
    [["x"]], [1, 2], [1, "x"], [1.5], range(3), iter([1, 2]), {"a": 1}, {"role": "user", "content": "x"}, object,
    object(), int,     ManyLines(), Unspeakable(), [ManyLines()], [Unspeakable()], {"role": ManyLines(), "content": 1},
    lambda: None, ...,
    Path("x"), Path("/dev/null"), torch.float32, torch.bfloat16, torch.int8, torch.device("cpu"), torch.device("meta"),
    np.float32, np.dtype("float32"), Trim(), Trim, Threshold(), Threshold, Quota(), stepsaver.Piece(0, "x", [1], False),
    [Trim(), Trim()], [Trim(), Threshold()], ["trim", 5], "trim", ["trim"], "threshold", "speculative",
    "autoregressive", [{"role": "user", "content": "x"}], [[{"role": "user", "content": "x"}], "x"],
    [{"role": "assistant", "content": ""}],
]  # fmt: skip
values = st.sampled_from(NUMBERS + THINGS) | st.sampled_from(VALUES) | registry_texts()
GENERATE = (
    "prompts", "n", "ids", "details", "decode", "rules", "policy", "threshold", "recipe", "batch_size",
    "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "chat",
)  # fmt: skip
SCORE = (
    "pairs", "decode", "rules", "policy", "threshold", "recipe", "batch_size", "estimator", "score_stop", "chat",
)  # fmt: skip
LOAD = (
    "name", "revision", "device", "dtype", "weights", "block_size", "sub_block_size", "mask_id", "stop_ids",
    "prefix_cache", "block_cache", "join",
)  # fmt: skip
COMPARE = ("model", "task", "configs", "limit", "baseline", "success", "batch_size", "folder", "progress")
CONFIG = (
    "rules",
    "policy",
    "decode",
    "threshold",
    "prefix_cache",
    "block_cache",
    "join",
    "recipe",
    "sub_block_size",
    "x",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> stepsaver.Model:
    return stepsaver.load(folder)


def ends_well(call: Callable[[], object]) -> None:
    Unspeakable.is_argument = True
    try:
        call()
    except stepsaver.UsageError as error:
        message = str(error)
        assert message, "it says nothing"
        assert message.isprintable(), message
        assert len(message) <= LONGEST_MESSAGE, message
    finally:
        Unspeakable.is_argument = False


def some(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """One to three arguments with any values."""
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)


def campaign(count: int, given_to: st.SearchStrategy[Any], call: Callable[[Any], object], *, repeatable: bool) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=repeatable,
        suppress_health_check=list(HealthCheck),
    )
    @given(given_to)
    def tried(arguments: Any) -> None:
        ends_well(lambda: call(arguments))

    tried()


def generating(model: stepsaver.Model, *, stream: bool) -> Callable[[dict[str, Any]], object]:
    def call(arguments: dict[str, Any]) -> object:
        asked = {"prompts": "ab", "max_new_tokens": 3} | arguments
        if isinstance(asked["max_new_tokens"], int | float) and asked["max_new_tokens"] > 500:
            asked["max_new_tokens"] = 10**6  # refused, and not decoded for minutes
        if not stream:
            return model.generate(asked.pop("prompts"), **asked)
        asked = {name: value for name, value in asked.items() if name not in ("n", "details")}
        return list(model.stream(asked.pop("prompts"), **asked))

    return call


def comparing(model: stepsaver.Model, tmp_path: Path) -> Callable[[dict[str, Any]], object]:
    """A task that is not there: arguments are read before it is missed, and nothing is run."""

    def call(arguments: dict[str, Any]) -> object:
        asked = {"model": model, "task": "no such", "configs": {"plain": []}, "folder": tmp_path} | arguments
        if isinstance(asked["folder"], str | Path):
            asked["folder"] = tmp_path / "inner" / str(asked["folder"])[:20].strip("./")
        return stepsaver.compare(asked.pop("model"), asked.pop("task"), asked.pop("configs"), **asked)

    return call


def run_all(model: stepsaver.Model, folder: Path, tmp_path: Path, *, times: int, repeatable: bool) -> None:
    def load(arguments: dict[str, Any]) -> object:
        asked = {"name": folder} | arguments
        return stepsaver.load(asked.pop("name"), **asked)

    def score(arguments: dict[str, Any]) -> object:
        asked = {"pairs": [("a", "b")]} | arguments
        return model.score(asked.pop("pairs"), **asked)

    def code(value: Any) -> None:
        for call in (model.encode, model.decode):
            ends_well(lambda call=call: call(value))  # type: ignore[misc]

    configs = st.dictionaries(values.filter(_hashable), values | some(CONFIG), max_size=2)
    compared = some(COMPARE) | st.fixed_dictionaries({"configs": configs})
    campaign(800 * times, some(GENERATE), generating(model, stream=False), repeatable=repeatable)
    campaign(300 * times, some(GENERATE), generating(model, stream=True), repeatable=repeatable)
    campaign(300 * times, some(SCORE), score, repeatable=repeatable)
    campaign(200 * times, some(LOAD), load, repeatable=repeatable)
    campaign(100 * times, values, code, repeatable=repeatable)
    campaign(300 * times, compared, comparing(model, tmp_path), repeatable=repeatable)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True


def test_two_thousand_calls(model: stepsaver.Model, folder: Path, tmp_path: Path) -> None:
    run_all(model, folder, tmp_path, times=1, repeatable=True)


@pytest.mark.long
def test_twenty_thousand_calls(model: stepsaver.Model, folder: Path, tmp_path: Path) -> None:
    run_all(model, folder, tmp_path, times=10, repeatable=False)
