"""Figures by reference, on artifacts of an experiment that is made up here."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.machine.measurement import store_measurement
from stepsaver.cli import main
from stepsaver.report.markdown import references

EXPERIMENT = """\
question: Does it hold?
tasks: [mini_gsm8k, mini_mmlu]
configs:
  - name: baseline
  - {name: trim_fast, rules: ["trim:level=changed"]}
  - {name: trim_safe, rules: ["trim:level=drift"]}
  - {name: window, rules: ["previous_row:refresh=block"]}
baseline: baseline
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""


ARTIFACT = Path(__file__).parents[3] / "experiments" / "02_trim" / "artifacts" / "mini_gsm8k" / "trim_changed.json"


def summary(config: str, up: float, drop: float, *, is_baseline: bool = False) -> dict[str, Any]:
    """A real one with other figures."""
    speed = [up, up - 0.05, up + 0.05]
    return json.loads(ARTIFACT.read_text()) | {
        "config": config,
        "is_baseline": is_baseline,
        "accuracy": 0.9 - drop / 100,
        "samples": 1319,
        "rate": [1500.0, 1400.0, 1600.0],
        "paired": {"drop_points": [drop, drop - 1, drop + 1], "lost": 3, "won": 2, "mcnemar_p": 1.0},
        "speed_up": {"tokens_per_s": speed, "seconds_per_sample": speed},
        "confirmation_p": 0.001,
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "experiments" / "00_tiny"
    saved = folder / "artifacts" / "mini_gsm8k"
    saved.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    figures = {"baseline": (1.0, 0.0), "trim_fast": (1.5, 4.0), "trim_safe": (1.3, 0.2)}
    for config, (up, drop) in figures.items():
        content = summary(config, up, drop, is_baseline=config == "baseline")
        (saved / f"{config}.json").write_text(json.dumps(content))
    references.stored_experiment.cache_clear()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(root: Path, text: str, name: str = "README.md", *, expected: int = 0) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    assert main(["docs"]) == expected
    return (root / name).read_text()


@pytest.mark.parametrize(
    ("marker", "value"),
    [
        ("00_tiny/mini_gsm8k/trim_fast speed_up", "1.50x"),
        ("00_tiny/mini_gsm8k/trim_fast speed_up_interval", "1.50x [1.45, 1.55]"),
        ("00_tiny/mini_gsm8k/trim_safe drop_interval", "0.2 [-0.8, 1.2]"),
        ("00_tiny/mini_gsm8k/* speed_up", "1.30x to 1.50x"),  # the baseline aside
        ("00_tiny/mini_gsm8k/trim_fast,trim_safe drop", "0.2 to 4.0"),
        ("*/mini_*/fastest config", "`trim_fast`"),
        ("*/mini_*/fastest<1.5 config", "`trim_safe`"),
        ("00_tiny/mini_gsm8k/baseline rate", "1,500"),
        ("00_tiny/mini_gsm8k/window speed_up", "not run yet"),
        ("00_tiny/mini_mmlu/window speed_up", "not run yet"),
        ("00_tiny/mini_gsm8k samples", "1,319"),
        ("00_tiny/mini_gsm8k outcome", "confirmed"),
        ("00_tiny status", "run: confirmed on mini_gsm8k (3 of 4 configs); not run yet: mini_mmlu"),
    ],
)
def test_values(root: Path, marker: str, value: str) -> None:
    assert filled(root, f"It is <!--= {marker} -->?<!--/-->.") == f"It is <!--= {marker} -->{value}<!--/-->."


def test_tables_and_the_page_of_an_experiment(root: Path) -> None:
    rows = "mini_gsm8k/baseline no reuse\nmini_gsm8k/*_safe\nmini_gsm8k/window"
    text = f"<!-- figures accuracy, speed_up_interval\n{rows}\n-->\n<!-- /figures -->\n"
    lines = filled(root, text, "experiments/00_tiny/results.md").splitlines()
    assert lines[5:-1] == [
        "|  | right | speed-up measured (95 %) |",
        "| --- | --- | --- |",
        "| no reuse | 90.0% | 1.00x |",
        "| `trim_safe` | 89.8% | 1.30x [1.25, 1.35] |",
        "| `window` | not run yet |  |",
    ]


def test_tables_of_results_come_from_artifacts(root: Path) -> None:
    page = filled(root, "# Mine\n\n<!-- tables -->\n<!-- /tables -->\n\nkept\n", "experiments/00_tiny/results.md")
    assert "| trim_fast |" in page
    assert page.endswith("<!-- /tables -->\n\nkept\n")


def test_check_writes_nothing_and_a_second_time_changes_nothing(root: Path) -> None:
    text = "It is <!--= 00_tiny/mini_gsm8k/trim_fast speed_up -->1.49x<!--/-->."
    (root / "README.md").write_text(text)
    assert main(["docs", "--check"]) == 1
    assert (root / "README.md").read_text() == text
    assert main(["docs"]) == 0
    assert main(["docs", "--check"]) == 0


def test_code_is_no_marker(root: Path) -> None:
    text = "```\n<!--= a/b/c speed_up -->1x<!--/-->\n```\n\nand `<!--= a/b/c x -->` too\n"
    assert filled(root, text) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<!--= 00_tiny/mini_gsm8k/trim_fats speed_up -->1<!--/-->", "trim_fast"),
        ("<!--= 00_tiny/mini_gsm8k/trim_fast sped_up -->1<!--/-->", "speed_up"),
        ("<!--= 00_tini/mini_gsm8k/trim_fast speed_up -->1<!--/-->", "00_tiny"),
        ("<!--= 00_tiny/mini_gsm/trim_fast speed_up -->1<!--/-->", "mini_gsm8k"),
        ("<!--= 00_tiny/mini_gsm8k/trim_fast speed_up -->1", "not closed"),
        ("<!-- figures accuracy -->\n<!-- /figures -->", "needs fields and rows"),
        ("<!-- figures measured/none -->\n<!-- /figures -->", "no stored measurement"),
    ],
)
def test_what_is_wrong_in_a_page_is_one_line(
    root: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert filled(root, text, expected=2) == text
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert "README.md" in complaint
    assert complaint.count("\n") == 1


def test_stored_measurements(root: Path) -> None:
    path = root / "benchmarks" / "measured" / "speed.json"
    store_measurement(path, "stepsaver speed", ("shape", "full step"), [("135M, 1", "90 ms")])
    table = filled(root, "<!-- figures measured/speed -->\n<!-- /figures -->")
    assert "| 135M, 1 | 90 ms |" in table
    assert ">90 ms<" in filled(root, "<!--= measured/speed 135M,_1 full_step -->?<!--/-->")
    assert ">stepsaver speed<" in filled(root, "<!--= measured/speed command -->?<!--/-->")
