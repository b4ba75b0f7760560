"""What `tools/docs.py` writes into Markdown, and that this repository's pages hold it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ARTIFACT = ROOT / "experiments" / "02_trim" / "artifacts" / "mini_gsm8k" / "trim_changed.json"
EXPERIMENT = """\
question: Does it hold?
tasks: [mini_gsm8k, mini_mmlu]
configs:
  - name: baseline
  - {name: trim_fast, rules: ["trim:level=changed"]}
  - {name: trim_safe, rules: ["trim:level=drift"]}
  - {name: window, rules: ["window"]}
baseline: baseline
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(config: str, up: float, drop: float) -> dict[str, Any]:
    """A real one with other figures."""
    speed = [up, up - 0.05, up + 0.05]
    return json.loads(ARTIFACT.read_text()) | {
        "config": config,
        "is_baseline": config == "baseline",
        "accuracy": 0.9 - drop / 100,
        "samples": 1319,
        "rate": [1500.0, 1400.0, 1600.0],
        "paired": {"drop_points": [drop, drop - 1, drop + 1], "test": "score", "lost": 3, "won": 2, "mcnemar_p": 1.0},
        "speed_up": {"tokens_per_s": speed, "seconds_per_sample": speed},
        "confirmation_p": 0.001,
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "experiments" / "00_tiny"
    saved = folder / "artifacts" / "mini_gsm8k"
    saved.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    for config, up, drop in (("baseline", 1.0, 0.0), ("trim_fast", 1.5, 4.0), ("trim_safe", 1.3, -0.01)):
        (saved / f"{config}.json").write_text(json.dumps(summary(config, up, drop)))
    return tmp_path


def figures(fields: str, *rows: str) -> str:
    return "\n".join([f"<!-- figures {fields}", *rows, "-->", "<!-- /figures -->", ""])


def test_this_repositorys_pages_are_as_written(docs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code = docs.main(["--check"])
    assert code == 0, f"{capsys.readouterr().out}run tools/docs.py"


def test_a_table_has_a_row_per_config_by_name_or_label(docs: ModuleType, root: Path) -> None:
    page = root / "experiments" / "00_tiny" / "results.md"
    rows = ("mini_gsm8k/baseline no reuse", "mini_gsm8k/trim_*", "00_tiny/mini_mmlu/window", "mini_mmlu/trim_fast it")
    page.write_text(figures("accuracy, drop, speed_up, rate, samples, verdict", *rows))
    assert docs.main([], root) == 0
    assert page.read_text().splitlines()[6:-1] == [
        "|  | right | drop in points (95 %) | speed-up (95 %) | tokens/s | samples | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| no reuse | 90.0% |  | 1.00x | 1,500 | 1,319 | baseline |",
        "| `trim_fast` | 86.0% | 4.0 [3.0, 5.0] | 1.50x [1.45, 1.55] | 1,500 | 1,319 | undecided |",
        "| `trim_safe` | 90.0% | 0.0 [-1.0, 1.0] | 1.30x [1.25, 1.35] | 1,500 | 1,319 | confirmed |",
        "| `window` | not run yet |  |  |  |  |  |",
        "| it | not run yet |  |  |  |  |  |",
    ]


def test_results_get_all_tables_and_keep_the_rest(docs: ModuleType, root: Path) -> None:
    page = root / "experiments" / "00_tiny" / "results.md"
    page.write_text("# Mine\n\n<!-- tables -->\nold\n<!-- /tables -->\n\nkept\n")
    docs.main([], root)
    assert "| trim_fast |" in page.read_text()
    assert "\nold\n" not in page.read_text()
    assert page.read_text().endswith("<!-- /tables -->\n\nkept\n")


def test_a_check_writes_nothing_and_a_second_time_changes_nothing(docs: ModuleType, root: Path) -> None:
    page = root / "README.md"
    page.write_text(text := figures("accuracy", "00_tiny/mini_gsm8k/trim_fast"))
    assert docs.main(["--check"], root) == 1
    assert page.read_text() == text
    assert docs.main([], root) == 0
    assert docs.main(["--check"], root) == 0


def test_a_stored_measurement_is_a_table_that_says_where_it_is_from(docs: ModuleType, root: Path) -> None:
    path = root / "benchmarks" / "measured" / "speed.json"
    path.parent.mkdir(parents=True)
    stored = {"command": "measure it", "machine": "EPYC", "date": "2026-11-19", "columns": ["shape", "step"]}
    path.write_text(json.dumps(stored | {"rows": [["135M", "90 ms"]]}))
    (root / "README.md").write_text("<!-- figures measured/speed --><!-- /figures -->")
    docs.main([], root)
    assert (root / "README.md").read_text().splitlines()[1:-1] == [
        "| shape | step |", "| --- | --- |", "| 135M | 90 ms |", "", "`measure it` on EPYC, 2026-11-19."
    ]  # fmt: skip


def test_code_is_no_marker(docs: ModuleType, root: Path) -> None:
    text = "```\n<!-- figures nothing -->\n<!-- /figures -->\n```\n\nand `<!-- tables -->` too `<!-- /tables -->`\n"
    (root / "README.md").write_text(text)
    assert docs.main([], root) == 0
    assert (root / "README.md").read_text() == text


def test_the_references_are_those_of_parsers_and_schema(docs: ModuleType) -> None:
    commands, experiment = docs.command_reference(), docs.experiment_reference()
    assert "## stepsaver report\n\n" in commands
    assert "| `--csv FILE` | write the table as CSV, too |" in commands
    assert "| `batch_size` | whole number from 1 on | `32` |" in experiment
    assert "| `tasks` | list | required |" in experiment
    assert "| `speed_up` | a condition such as `> 1.2` | required |" in experiment


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (figures("accuracy", "00_tiny/mini_gsm8k/trim_fats"), "trim_fast"),
        (figures("sped_up", "00_tiny/mini_gsm8k/trim_fast"), "speed_up"),
        (figures("accuracy", "00_tini/mini_gsm8k/trim_fast"), "00_tiny"),
        (figures("accuracy", "mini_gsm8k/trim_fast"), "is no reference"),
        ("<!-- figures measured/none --><!-- /figures -->", "no stored measurement"),
    ],
)
def test_what_is_wrong_in_a_page_is_one_line(
    docs: ModuleType, root: Path, marker: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "README.md").write_text(marker)
    assert docs.main([], root) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "README.md" in said
    assert said.count("\n") == 1
    assert (root / "README.md").read_text() == marker
