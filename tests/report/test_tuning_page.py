"""What the page of a tuning, its lines and its recipe say about the winner."""

from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.store import open_cell_files
from stepsaver.commands.tune import outcome_lines
from stepsaver.evaluation.records import InferencePath, RequestKey, RequestRecord
from stepsaver.report.tuning_page import confirmed_parallelism, parallelism_line, tuning_page
from tests.bench.made_up import PROVENANCE, identity, kinds, timing

KINDS = kinds(prefill=5, full=6, commit=2)


def stored(folder: Path, chunks: int, *, steps: int, path: InferencePath = "generation") -> None:
    """Stores chunks of one text each, with 24 tokens and a stop token."""
    cell = open_cell_files(folder, identity(), "run", provenance=PROVENANCE)
    by_kind = KINDS | kinds(full=steps)
    for chunk in range(chunks):
        key = RequestKey("t", chunk, 0, 0)
        ids = (*range(24), 99 + chunk)
        record = RequestRecord(key, path, "d", prompt_tokens=3, tokens_cut=0, ids=ids, text="x", finish="stop")
        cell.append_chunk(chunk, [record], timing(chunk, denoising_steps=steps, by_kind=by_kind))


def document(**changes: Any) -> dict[str, Any]:
    recipe = {"rules": ["trim"], "policy": "threshold", "sub_block_size": 8, "join": "all", "batch_size": 2}
    attempt = {"name": "fast", "number": 1, "confidence": 0.95, "problems": 64, "outcome": "confirmed"}
    attempt |= {"speed_up": [1.5, 1.4, 1.6], "drop": [0.001, -0.005, 0.007]}
    return {
        "question": "What is fast?",
        "model": "m",
        "task": "t",
        "batch_size": 2,
        "max_drop": 1.0,
        "measure": "accuracy",
        "sentence": "Confirmed.",
        "outcome": "confirmed",
        "seconds": 1.0,
        "candidates": [],
        "never_run": [],
        "attempts": [attempt],
        "recipe": recipe,
        "parallelism": [],
    } | changes


def test_baseline_and_winner_are_counted_on_the_same_chunks(tmp_path: Path) -> None:
    stored(tmp_path / "baseline", 4, steps=12)
    stored(tmp_path / "fast", 3, steps=6)
    rows = confirmed_parallelism(tmp_path, ("baseline", "fast"), (1, 2, 3))
    assert [each["name"] for each in rows] == ["baseline", "fast"]
    assert [each["tokens_per_step"] for each in rows] == pytest.approx([24 / 12, 24 / 6])
    assert [each["tokens_per_forward"] for each in rows] == pytest.approx([24 / 14, 24 / 8])


def test_there_is_none_where_one_has_nothing_or_texts_are_scored(tmp_path: Path) -> None:
    stored(tmp_path / "baseline", 2, steps=12)
    assert confirmed_parallelism(tmp_path, ("baseline", "fast"), (0, 1)) == []
    stored(tmp_path / "fast", 2, steps=6)
    assert confirmed_parallelism(tmp_path, ("baseline", "fast"), (7,)) == []
    for name in ("baseline", "fast"):
        stored(tmp_path / "scored" / name, 2, steps=6, path="scoring")
    assert confirmed_parallelism(tmp_path / "scored", ("baseline", "fast"), (0, 1)) == []


def test_lines_and_page_say_it_with_and_without_commits() -> None:
    rows = [
        {"name": "baseline", "tokens_per_step": 2.0, "tokens_per_forward": 1.5},
        {"name": "fast", "tokens_per_step": 4.0, "tokens_per_forward": 3.25},
    ]
    found = document(parallelism=rows)
    line = "baseline: TPF 2.00, with commits 1.50; fast: TPF 4.00, with commits 3.25"
    assert parallelism_line(found) == line
    assert outcome_lines(found)[-1] == line
    assert line in tuning_page(found)


def test_the_page_has_attempts_candidates_and_what_was_never_run() -> None:
    seen = {"name": "slow", "problems": 32, "speed_up": [1.25], "drop_points": [2.0, -1.0, 5.0], "rank": None}
    begun = {"name": "stopped", "number": 2, "confidence": 0.975, "problems": 96, "outcome": "begun"}
    begun |= {"speed_up": None, "drop": None}
    found = document(candidates=[seen], never_run=["unseen"])
    found["attempts"].append(begun)
    page = tuning_page(found)
    for text in ('"1.50x"', "[1.40, 1.60]", '"+0.10"', "[-0.50, +0.70]", '"1.25x"', "[-1.0", "unseen", "97.5 %"):
        assert text in page
    lines = outcome_lines(found)
    assert (
        lines[-2]
        == "attempt 1, fast: confirmed: 1.50x [1.40, 1.60], drop +0.10 [-0.50, +0.70] points on 64 fresh problems"
    )
    assert lines[-1] == "attempt 2, stopped: begun"


def test_without_it_nothing_is_said() -> None:
    found = document()
    assert not any("TPF" in line for line in outcome_lines(found))
    assert "TPF" not in tuning_page(found)
