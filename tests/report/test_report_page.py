"""The report's page in a real browser: made-up results, so that nothing has to be run."""

import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.audit import Finding
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import find_experiment
from stepsaver.report.artifacts import read_artifacts
from stepsaver.report.cells import ReportCell
from stepsaver.report.experiment_page import experiment_page
from stepsaver.report.tables import complete_table, result_table, result_text
from tests.report.browsing import background_shades, count, open_page, set_scheme, show, text, texts
from tests.report.reports import made_up_experiment, made_up_task

HOSTILE = [
    "<script>window.broken=1</script>",
    "</script><img src=x onerror=window.broken=1>",
    "]]><svg onload=window.broken=1>",
    "<b>bold</b> &amp; <a href='javascript:window.broken=1'>link</a>\u2028{{ data }} %{y} ${x}",
]
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return made_up_experiment(tmp_path_factory.mktemp("made_up") / "00_made_up")


@pytest.fixture(scope="module")
def page(experiment: Experiment) -> Path:
    remark = Finding("remark", "rates", "k1_first was slow in 1 of 10 chunks")
    path = experiment.folder / "report.html"
    path.write_text(experiment_page(experiment, [made_up_task(experiment, findings=[remark])]), encoding="utf-8")
    return path


def test_a_control_is_called_one_and_is_not_red(experiment: Experiment) -> None:
    """k1_middle and k1_last do exactly the work of k1_first: there is nothing to reject."""
    task = made_up_task(experiment)
    same = {"is_control": True}
    controls = [
        replace(cell, summary=cell.summary.model_copy(update=same))
        for cell in task.cells[1:3]
        if cell.summary is not None
    ]
    task = replace(task, cells=(task.cells[0], *controls, *task.cells[3:]))
    shown = [row[1] for row in result_table(task)["rows"]]
    control = {"text": "control", "value": "control", "small": "it does exactly the baseline's work"}
    assert shown[1:3] == [control, control]
    assert {each.get("tone") for each in shown if each["text"] == "rejected"} <= {"bad"}
    notes = [row[-1]["text"] for row in complete_table(task)["rows"][:3]]
    assert notes == ["Baseline", *["control: it does exactly the baseline's work"] * 2]
    lines = result_text(task.summaries, task.verdict()).splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["baseline", "control", "control"]


def test_committed_artifacts_show_controls_and_rates_over_chunks() -> None:
    for name in ("00_baseline", "02_trim"):
        experiment = find_experiment(name)
        task = read_artifacts(experiment, experiment.folder / "results", "mini_gsm8k")
        assert task is not None
        outcomes = {each.config: each.outcome for each in task.verdict().configs}
        twins = [each for each in outcomes if each in ("k1_middle", "k1_last")]
        assert {outcomes[each] for each in twins} == ({"control"} if name == "00_baseline" else set())
        for row in (row for row in result_table(task)["rows"] if row[1]["text"] != "missing"):
            assert re.fullmatch(r"\[[\d,]+, [\d,]+\]", row[7]["small"]), row


def names(browser: Any) -> list[str]:
    """The configs in the order of the table, without the rules under their names."""
    cells = "document.querySelectorAll('[data-block=results] tbody td:first-child')"
    return browser.execute_script(f"return [...{cells}].map((each) => each.firstChild.textContent)")


def points(browser: Any) -> list[str]:
    """What the marks of the first figure say when they are pointed at."""
    return browser.execute_script("""
        const traces = document.querySelector('.plot').data.filter((each) => each.meta === 'config');
        return traces.map((each) => each.text[0]);
    """)


def test_the_first_screen_answers_the_question(chromium: Any, page: Path, experiment: Experiment) -> None:
    show(chromium, page)
    assert text(chromium, "#title") == "Does it hold?"
    assert re.match(r"(Undecided|Rejected|Confirmed).*\d\.\d\dx \[.*\] points", text(chromium, ".verdict"))
    told = points(chromium)
    assert [each.split("<br>")[0] for each in told] == [config.name for config in experiment.configs]
    assert count(chromium, "[data-name=accuracy_speed] .scatterlayer .trace:has(.point)") == len(experiment.configs)
    assert count(chromium, "[data-name=accuracy_speed] .errorbar") == len(experiment.configs)
    region = chromium.execute_script("return document.querySelector('.plot').layout.shapes[0]")
    assert region["x0"] == pytest.approx(1.2 * 104.5)
    assert region["y0"] == pytest.approx(85)
    bottom = chromium.execute_script("return document.querySelector('.plot').getBoundingClientRect().bottom")
    assert bottom < 900
    assert text(chromium, "[data-block=audit] li") == "remarkk1_first was slow in 1 of 10 chunks"
    every_figure_is_drawn(chromium)


def every_figure_is_drawn(chromium: Any) -> None:
    names = ["accuracy_speed", "work", "rate_over_time"]
    assert chromium.execute_script("return [...document.querySelectorAll('.plot')].map((p) => p.dataset.name)") == names
    for name in names:
        assert count(chromium, f"[data-name={name}] .main-svg") > 0, name
    assert count(chromium, "[data-name=work] .barlayer .trace") == 5
    facts = dict(zip(texts(chromium, ".facts dt"), texts(chromium, ".facts dd"), strict=True))
    assert "hash abc" in facts["model"]
    assert "prefix cache on" in facts["decoding"]


def test_columns_sort_up_and_down(chromium: Any, page: Path) -> None:
    show(chromium, page)
    before = names(chromium)
    headings = chromium.find_elements("css selector", "[data-block=results] th button")
    button = next(each for each in headings if each.text.startswith("speed-up"))
    drop = next(each for each in headings if each.text.startswith("drop"))
    button.click()
    assert names(chromium) == before  # made up in that order
    button.click()
    assert names(chromium) == before[::-1]
    assert chromium.execute_script("return arguments[0].parentNode.ariaSort", button) == "descending"
    drop.click()
    assert names(chromium)[-1] == "k1_first"  # the baseline has no drop: what has no value is last


def test_verdicts_and_rules_are_in_sight_and_a_telephone_scrolls_little(chromium: Any, page: Path) -> None:
    show(chromium, page, width=1200)
    heading = chromium.find_elements("css selector", "[data-block=results] th")[1]
    assert heading.text.strip() == "verdict"
    assert heading.rect["x"] + heading.rect["width"] < 600
    rules = "layer_reuse:k=2,layers=first,mode=output"
    assert texts(chromium, "[data-block=results] td:first-child .small")[3] == rules
    show(chromium, page, width=400)
    assert chromium.execute_script("return document.documentElement.scrollHeight") < 5000
    assert texts(chromium, "details:not([open]) summary") == ["Parallelism", "Where this comes from", "Runs"]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_layout_holds_in_light_and_dark(chromium: Any, page: Path, width: int) -> None:
    show(chromium, page, width=width)
    client = chromium.execute_script("return document.documentElement.clientWidth")
    assert chromium.execute_script("return document.documentElement.scrollWidth") == client
    overlapping = chromium.execute_script("""
        const boxes = [...document.querySelectorAll('.block')].map((each) => each.getBoundingClientRect());
        const overlap = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
          && one.top < other.bottom - 1 && other.top < one.bottom - 1;
        return boxes.some((one, place) => boxes.slice(place + 1).some((other) => overlap(one, other)));
    """)
    assert not overlapping
    outside = chromium.execute_script("""
        return [...document.querySelectorAll('.plot')].filter((each) => {
          const inner = each.querySelector('.main-svg').getBoundingClientRect(), outer = each.getBoundingClientRect();
          return inner.bottom > outer.bottom + 1 || inner.right > outer.right + 1;
        }).map((each) => each.dataset.name);
    """)
    assert outside == []
    light = chromium.execute_script("return document.querySelector('.plot').layout.font.color")
    assert min(background_shades(chromium)) > 192
    set_scheme(chromium, "dark")
    figures_follow = """
        const [light, done] = arguments, colour = () => document.querySelector('.plot').layout.font.color;
        const look = () => (colour() === light ? setTimeout(look, 20) : done());
        look();
    """
    chromium.execute_async_script(figures_follow, light)
    assert max(background_shades(chromium)) < 64
    assert chromium.get_log("browser") == []


def test_samples_show_where_two_answers_part(chromium: Any, page: Path) -> None:
    show(chromium, page)
    assert text(chromium, ".question") == "What is 0?"
    assert texts(chromium, ".answer-head strong") == ["k1_first", "k2_first"]  # the first that answers otherwise
    assert texts(chromium, ".answer-head .badge") == ["right", "wrong"]
    assert texts(chromium, ".answer") == ["the answer to 0 is 0", "the answer to 0 is 1"]
    assert texts(chromium, ".answer mark") == ["0", "1"]
    chromium.find_element("css selector", "[aria-label='next sample']").click()
    assert text(chromium, ".question") == "What is 1?"
    choose = "const s = document.querySelectorAll('.browser-controls select')[arguments[0]]; s.value = arguments[1];"
    choose += " s.dispatchEvent(new Event('change'))"
    chromium.execute_script(choose, 2, 3)
    assert text(chromium, ".sample") == "No sample is like that."
    chromium.execute_script(choose, 1, 1)
    chromium.execute_script(choose, 2, 0)
    assert count(chromium, ".answer mark") == 0
    assert "Both answers are equal." in text(chromium, ".sample")


def test_hostile_text_stays_text(chromium: Any, tmp_path: Path) -> None:
    experiment = made_up_experiment(tmp_path / "hostile", question="'" + HOSTILE[1].replace("'", "''") + "'")
    task = made_up_task(
        experiment,
        answer=lambda place, sample: HOSTILE[(place + sample) % len(HOSTILE)],
        question=lambda sample: HOSTILE[sample % len(HOSTILE)],
        subjects=HOSTILE,
        findings=[Finding("invalid", "samples", each) for each in HOSTILE],
        unfinished={"k3_last": ReportCell(experiment.configs[-1], "failed", HOSTILE[0])},
    )
    other = made_up_task(experiment)
    path = tmp_path / "report.html"
    path.write_text(
        experiment_page(experiment, [task], others={task.folder: other}, other_name=HOSTILE[1]), encoding="utf-8"
    )
    assert not re.search("\u2028|<img|<svg onload", path.read_text(encoding="utf-8").split("* plotly.js")[0])
    show(chromium, path)
    for _ in HOSTILE[1:]:
        chromium.find_element("css selector", "[aria-label='next sample']").click()
    assert chromium.execute_script("return window.broken === undefined")
    assert count(chromium, "main img, main script, main b, .plot a, main [onload], main [onerror]") == 0
    assert text(chromium, "#title") == HOSTILE[1]
    assert text(chromium, ".question") == HOSTILE[3]
    drawn = " ".join(texts(chromium, "[data-name=accuracy_speed] .legendtext"))
    assert HOSTILE[1] in drawn
    chromium.execute_script(
        "Plotly.Fx.hover(document.querySelector('[data-name=accuracy_speed]'), [{curveNumber: 10, pointNumber: 0}])"
    )
    assert count(chromium, ".hoverlayer .hovertext") == 1
    assert chromium.get_log("browser") == []


def test_what_is_not_finished_is_said_and_the_rest_is_shown(chromium: Any, tmp_path: Path) -> None:
    experiment = made_up_experiment(tmp_path / "unfinished")
    first, *_, running, failed = experiment.configs
    unfinished = {
        first.name: ReportCell(first, "missing", "not run yet"),
        running.name: ReportCell(running, "running", "running, 4 of 12 samples stored"),
        failed.name: ReportCell(failed, "failed", "summary.json cannot be read"),
    }
    path = tmp_path / "report.html"
    path.write_text(experiment_page(experiment, [made_up_task(experiment, unfinished=unfinished)]), encoding="utf-8")
    show(chromium, path)
    assert len(points(chromium)) == 6  # there is no baseline: no region either, and nothing breaks
    assert chromium.execute_script("return document.querySelector('.plot').layout.shapes.length") == 0
    rows = dict(
        zip(
            names(chromium),
            texts(chromium, "[data-block=results] td:nth-child(2)"),
            strict=True,
        )
    )
    assert rows[first.name] == "missingnot run yet"
    assert rows[running.name] == "runningrunning, 4 of 12 samples stored"
    assert rows[failed.name] == "failedsummary.json cannot be read"
    assert len(rows) == 9
    assert "k3_last: summary.json cannot be read" in " ".join(texts(chromium, "[data-block=audit] li"))


def test_a_large_report_is_small_enough_to_mail(
    chromium: Any, experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """9 configs x 1,319 samples, every answer another one of 1,100 letters: the worst that can come."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(3000)]
    words += [str(each) for each in range(500)]

    def long_text(*_: int) -> str:
        return " ".join(generator.choices(words, k=170))

    task = made_up_task(experiment, samples=1319, answer=long_text, question=long_text)
    path = tmp_path / "report.html"
    path.write_text(experiment_page(experiment, [task]), encoding="utf-8")
    size = path.stat().st_size
    assert size < 15 * MEGABYTE
    started = time.perf_counter()
    open_page(chromium, path)
    opened = time.perf_counter() - started
    chromium.execute_async_script("window.shown.then(() => arguments[0]())")
    complete = time.perf_counter() - started
    with capsys.disabled():
        print(f" [{size / MEGABYTE:.1f} MB, open after {opened:.1f} s, complete after {complete:.1f} s]", end="")
    assert text(chromium, ".browser-controls .small") == "of 1,319"
    assert len(points(chromium)) == 9


def test_the_page_needs_nothing_from_outside(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    ours = written.split("/**\n* plotly.js")[0]
    assert not re.search(r"https?://|@import|\bsrc=", ours)
    assert "{{" not in ours
    assert "default-src 'none'" in ours
