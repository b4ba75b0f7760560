"""What others published stands beside our runs as theirs, number by number, with its faults."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stepsaver.cli import main
from stepsaver.report.artifacts import save_artifacts
from stepsaver.report.blocks import markdown
from stepsaver.report.cells import ReportTask
from stepsaver.report.parallelism import parallelism_of
from stepsaver.report.published_numbers import published_blocks, published_names, read_published
from tests.report.reports import made_up_experiment, made_up_task

CONFIGS = [f"k{k}_{layers}" for k in (1, 2, 3) for layers in ("first", "middle", "last")]


@pytest.fixture
def gsm8k(tmp_path: Path) -> ReportTask:
    return as_task(made_up_task(made_up_experiment(tmp_path / "00_made_up")), "gsm8k_boxed")


def as_task(task: ReportTask, name: str) -> ReportTask:
    cells = tuple(
        replace(each, summary=each.summary and each.summary.model_copy(update={"task": name})) for each in task.cells
    )
    return replace(task, folder=name, cells=cells)


def test_the_files_are_whole() -> None:
    configs_of = {"d3llm": ["one token a forward", "threshold"], "source": CONFIGS}
    assert published_names() == list(configs_of)
    for name in published_names():
        found = read_published(name)
        for benchmark in found.benchmarks:
            configs = list(benchmark.results)
            assert set(configs) <= set(configs_of[name])
            assert len(configs) == len(configs_of[name]) or "10 samples, " in benchmark.name
            assert all(any(fault.concerns(benchmark.name, config) for fault in found.faults) for config in configs)


def test_the_numbers_are_the_documents(shared: Path) -> None:
    """Every row of the source's complete table, and its one number of MMLU."""
    text = "\n".join(path.read_text() for path in sorted((shared / "source_documents").glob("*.txt")))
    gsm8k, mmlu, minerva, before, after = read_published("source").benchmarks
    rows = re.findall(r"\| (k\d_\w+) \| \d \| \w+ \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|", text)
    assert {name: tuple(map(float, numbers)) for name, *numbers in rows} == {
        name: (pytest.approx(100 * each.accuracy), each.tokens_per_s, each.hours)
        for name, each in gsm8k.results.items()
    }
    assert f"{gsm8k.total_tokens:,}" in text
    for benchmark, end in ((minerva, " |\n"), (before, " | Quadro"), (after, " | Quadro")):
        of = " (limit 10)" if benchmark.samples == 10 else ""
        for name, each in benchmark.results.items():
            assert f"| {name}{of} | {100 * each.accuracy:.1f}% | {each.tokens_per_s:.2f}{end}" in text
    assert {each.accuracy for each in mmlu.results.values()} == {
        float(each) / 100 for each in re.findall(r"All configurations\*\*: ([\d.]+)%", text)
    }


def test_a_page_and_a_table_say_whose_numbers_they_are(gsm8k: ReportTask) -> None:
    table, faults, *others = published_blocks(gsm8k, read_published("source"))
    assert [each["title"] for each in others if each["kind"] == "table"] == [
        f"Reported by others: GSM8K, 10 samples, {when} its bugs 1 and 3 were fixed" for when in ("before", "after")
    ]
    assert not any("forward on reuse" in item["text"] for item in others[-1]["items"])
    assert table["caption"].startswith("Reported by others, not measured by us: the source's 00_baseline")
    by_name = {row[0]["text"]: [each["text"] for each in row[1:]] for row in table["rows"]}
    # Our tokens/s is the median over chunks, as in every table, not the 100.00 over the whole time.
    assert by_name["k1_first"] == ["90.00 %", "80.44 %", "104.50", "22.75", "no fast path, odd twin, loading counted"]
    assert "eleven layers" in by_name["k2_first"][-1]
    assert "eleven layers" not in by_name["k2_last"][-1]
    assert not any("reuse not applied" in cells[-1] for cells in by_name.values())
    texts = [item["text"] for item in faults["items"]]
    assert texts[0].startswith("forward on reuse (k2_first, k2_middle, k2_last, k3_first")
    written = f"{markdown(table)}\n{markdown(faults)}"
    assert "| k2_last | 75.00 % | 73.77 % | 109.50 | 40.51 |" in written
    assert all(f"- {text}" in written for text in texts)


def test_tokens_per_forward_stand_beside_ours(gsm8k: ReportTask) -> None:
    table, _ = published_blocks(gsm8k, read_published("d3llm"))
    mine = gsm8k.experiment.name
    sides = [f"accuracy, {mine}", "accuracy, reported", f"TPF, {mine}", "TPF, reported"]
    assert table["columns"] == ["config", *sides, "known faults"]
    by_name = {row[0]["text"]: [each["text"] for each in row[1:5]] for row in table["rows"]}
    assert by_name["threshold"] == ["-", "81.48 %", "-", "2.21"]
    ours = parallelism_of(gsm8k.summaries[0])
    assert ours is not None
    assert by_name["k1_first"] == ["90.00 %", "-", f"{ours.tokens_per_step:.2f}", "-"]
    assert "on a device that is not said" in table["caption"]
    assert "GSM8K by a metric that is not said. Here:" in table["caption"]


def test_mmlu_has_the_fault_that_voids_it(gsm8k: ReportTask) -> None:
    table, faults = published_blocks(as_task(gsm8k, "mmlu_five_shot"), read_published("source"))
    assert {(row[2]["text"], row[4]["text"]) for row in table["rows"]} == {("66.53 %", "-")}
    assert any(item["text"].startswith("reuse not applied (all configs)") for item in faults["items"])


def test_another_task_has_no_counterpart(gsm8k: ReportTask) -> None:
    other = as_task(gsm8k, "ifeval")
    assert published_blocks(other, read_published("source")) == []


def test_the_command(gsm8k: ReportTask, capsys: pytest.CaptureFixture[str]) -> None:
    save_artifacts(gsm8k)
    folder = gsm8k.experiment.folder
    assert main(["report", str(folder), "--task", "gsm8k_boxed", "--compare", "source"]) == 0
    assert "#### Reported by others" in (folder / "results.md").read_text()
    assert "What was wrong with the reported numbers" in (folder / "report.html").read_text()
    capsys.readouterr()
    assert main(["report", str(folder), "--task", "ifeval", "--compare", "source"]) == 2
    assert (
        "has numbers of gsm8k_boxed, gsm8k, mmlu_five_shot, minerva_math_boxed, none of ifeval"
        in capsys.readouterr().err
    )
