"""What tells the configs of a table apart."""

from pathlib import Path

import pytest

from stepsaver.bench.experiment_file import read_experiment
from stepsaver.report.blocks import markdown, plain_table
from stepsaver.report.results_page import log_entry
from stepsaver.report.tables import complete_table, result_text
from tests.report.reports import EXPERIMENT, made_up_experiment, made_up_task

LAST = ("Accuracy", "Throughput (tokens/s)", "Total Tokens", "Total Time (h)", "Notes")


def test_the_sources_grid_has_the_sources_columns(tmp_path: Path) -> None:
    task = made_up_task(made_up_experiment(tmp_path))
    lines = markdown(complete_table(task)).splitlines()
    assert lines[0] == f"| Config | Reuse K | Layer Subset | {' | '.join(LAST)} |"
    assert [line.split(" | ")[:3] for line in lines[2:5]] == [
        ["| k1_first", "1", "first"], ["| k1_middle", "1", "middle"], ["| k1_last", "1", "last"]
    ]  # fmt: skip
    assert "| k2_first | 2 | first | 81.00 % | 107.50 [105.00, 110.00] |" in lines[5]
    assert "  - Layer Reuse: k=1/2/3\n  - Layer Subset: first/middle/last\n" in log_entry(task)


def test_a_terminal_has_80_columns_or_everything(tmp_path: Path) -> None:
    task = made_up_task(made_up_experiment(tmp_path))
    lines = result_text(task.summaries, task.verdict()).splitlines()
    assert lines[:3] == [
        "config      verdict   right   drop in points     speed-up            over AR",
        "k1_first    baseline  90.0 %  -                  1.00x               -",
        "k1_middle   rejected  87.0 %  3.0 [2.0, 4.0]     1.05x [1.03, 1.07]  -",
    ]
    wide = result_text(task.summaries, task.verdict(), is_wide=True).splitlines()
    assert wide[2].startswith(
        "k1_middle  rejected: the speed-up is not > 1.2 on its interval   87.0 % [85.0, 89.0]  3.0 "
    )
    assert wide[2].endswith("1.05x [1.03, 1.07]  -        1.06x      106 [103, 108]  10,000  990       3 %")


def test_a_long_name_is_broken_where_it_has_a_line() -> None:
    rows = [("window_trim_near_light_joined", "a" * 60), ("short", "b")]
    assert plain_table(rows, ("config", "what"), width=80).splitlines() == [
        "config              what",
        f"window_trim_near_   {'a' * 60}",
        "  light_joined",
        "short               b",
    ]
    assert plain_table(rows, ("config", "what")).splitlines()[1] == f"window_trim_near_light_joined  {'a' * 60}"


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
    table = complete_table(task)
    assert table["columns"] == ["Config", *columns, *LAST]
    assert [tuple(each["text"] for each in row[1 : 1 + len(columns)]) for row in table["rows"]] == cells
