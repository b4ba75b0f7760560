"""What tells the configs of a table apart."""

from pathlib import Path

import pytest

from stepsaver.bench.experiment_file import read_experiment
from stepsaver.report.experiment_log import log_entry
from stepsaver.report.tables import complete_columns, complete_rows
from tests.report.reports import EXPERIMENT, made_up_experiment, made_up_task

LAST = ("Accuracy", "Throughput (tokens/s)", "Total Tokens", "Total Time (h)", "Notes")


def test_the_sources_grid_has_the_sources_columns(tmp_path: Path) -> None:
    task = made_up_task(made_up_experiment(tmp_path))
    assert complete_columns(task) == ("Config", "Reuse K", "Layer Subset", *LAST)
    assert [row[:3] for row in complete_rows(task)][:4] == [
        ("k1_first", "1", "first"),
        ("k1_middle", "1", "middle"),
        ("k1_last", "1", "last"),
        ("k2_first", "2", "first"),
    ]
    assert log_entry(task).configuration[:2] == ("Layer Reuse: k=1/2/3", "Layer Subset: first/middle/last")


@pytest.mark.parametrize(
    ("configs", "columns", "cells"),
    [
        (["trim:level=drift,budget=2", "trim:level=changed,budget=2"], ("level",), [("drift",), ("changed",)]),
        (["layer_reuse:k=2", "layer_reuse:k=2,mode=mlp"], ("mode",), [("delta",), ("mlp",)]),
        (["trim", "layer_reuse:k=2"], ("Rules",), [("trim",), ("layer_reuse:k=2",)]),
    ],
)
def test_other_comparisons_are_told_by_what_they_vary(
    tmp_path: Path, configs: list[str], columns: tuple[str, ...], cells: list[tuple[str, ...]]
) -> None:
    listed = "\n".join(f'  - {{name: c{place}, rules: ["{rule}"]}}' for place, rule in enumerate(configs))
    text = EXPERIMENT.format(question="q")
    grid = text[text.index("configs:") : text.index("success:")]
    (tmp_path / "experiment.yaml").write_text(text.replace(grid, f"configs:\n{listed}\nbaseline: c0\n"))
    task = made_up_task(read_experiment(tmp_path))
    assert complete_columns(task) == ("Config", *columns, *LAST)
    assert [row[1 : 1 + len(columns)] for row in complete_rows(task)] == cells
