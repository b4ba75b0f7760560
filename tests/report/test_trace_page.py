"""The page that plays a trace, in a real browser and without one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepsaver.cli import main
from stepsaver.engine.models.transformer import Transformer
from stepsaver.evaluation.tokenizer import TextTokenizer
from stepsaver.report.html_pages import json_in_html, trace_page
from tests.conftest import GOLDEN
from tests.report.browsing import background_shades, count, open_page, text
from tests.report.traces import BLOCK, document_of, engine_of
from training.problems.tokenizer import write_tokenizer

HOSTILE = [
    "</script><img src=x onerror=window.broken=1>",
    "<!--<script>window.broken=1</script>",
    "&lt;b&gt;\u2028{{ data }}",
    '"><svg onload=window.broken=1>',
]


def hostile(token: int) -> str:
    return HOSTILE[token % len(HOSTILE)]


@pytest.fixture(scope="module")
def page(tiny_model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    engines = [engine_of(tiny_model, "window", "trim"), engine_of(tiny_model)]
    path = tmp_path_factory.mktemp("page") / "trace.html"
    path.write_text(trace_page(document_of(engines, text=lambda token: f" word{token}")), encoding="utf-8")
    return path


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def slide(browser: Any, value: int) -> None:
    script = "const s = document.getElementById('slider'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    browser.execute_script(script, value)


def test_hostile_text_cannot_leave_the_data() -> None:
    inside = json_in_html({"texts": HOSTILE})
    assert not re.search("[<>&\u2028]", inside)
    assert json.loads(inside) == {"texts": HOSTILE}


def test_the_page_needs_nothing_from_outside(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|\bsrc=", written)
    assert "{{" not in written
    assert len(written) < 200_000


def test_hostile_text_stays_text(chromium: Any, tiny_model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(trace_page(document_of([engine_of(tiny_model)], text=hostile)), encoding="utf-8")
    open_page(chromium, path)
    press(chromium, "\ue010")  # End: all tokens are shown
    assert count(chromium, "main img, main svg, main script, main b") == 0
    assert chromium.execute_script("return window.broken === undefined")
    assert HOSTILE[0] in text(chromium, ".text")
    assert "{{ data }}" in text(chromium, ".text")
    assert chromium.get_log("browser") == []


def test_the_slider_changes_the_shown_step(chromium: Any, page: Path) -> None:
    open_page(chromium, page)
    assert text(chromium, "#place").startswith("step 1 of ")
    first = text(chromium, ".block")
    slide(chromium, 3)
    assert text(chromium, "#place").startswith("step 4 of ")
    assert text(chromium, ".block") != first
    assert count(chromium, ".run:first-child .block-line:not(.axis)") == BLOCK
    assert count(chromium, ".run:first-child .block-line.framed") in (0, BLOCK // 2)


def test_squares_show_what_the_plan_says(chromium: Any, page: Path) -> None:
    open_page(chromium, page)
    document = json.loads(text(chromium, "#data"))
    for place, frame in enumerate(document["samples"][0]["runs"][0]["frames"]):
        slide(chromium, place)
        done = frame["totals"]["mlp_run"]
        before = document["samples"][0]["runs"][0]["frames"][place - 1]["totals"]["mlp_run"] if place else 0
        if frame["kind"] != "prefill":
            assert count(chromium, ".run:first-child .block .cell:is(.computed, .partly)") == done - before
        assert text(chromium, ".run:first-child dd:nth-of-type(1)") == str(frame["totals"]["tokens"])
    chromium.execute_script("document.querySelector('.block .cell[data-row]').click()")
    assert text(chromium, ".reading").startswith("position 0, layer 0: ")


def test_rows_that_are_not_there_yet_look_unlike_skipped_ones(
    chromium: Any, tiny_model: Transformer, tmp_path: Path
) -> None:
    document = document_of([engine_of(tiny_model, "suffix_dropout")])
    path = tmp_path / "trace.html"
    path.write_text(trace_page(document), encoding="utf-8")
    open_page(chromium, path)
    frames = document["samples"][0]["runs"][0]["frames"]
    (first, *_) = (place for place, frame in enumerate(frames) if frame["hidden"] != "none")
    slide(chromium, first)
    layers = document["layers"]
    assert count(chromium, ".block .cell.absent") == layers * BLOCK // 2
    assert count(chromium, ".block .cell.skipped") == 0
    chromium.execute_script("document.querySelector('.block .cell.absent').click()")
    assert text(chromium, ".reading") == "position 4, layer 0: not there yet: neither computed nor attended to"
    slide(chromium, next(place for place, frame in enumerate(frames) if frame["kind"] == "commit"))
    assert count(chromium, ".block .cell.absent") == 0


def test_keys_and_buttons_step_and_play(chromium: Any, page: Path) -> None:
    open_page(chromium, page)
    right, left, home, end = "\ue014", "\ue012", "\ue011", "\ue010"
    press(chromium, right, right, right, left)
    assert text(chromium, "#place").startswith("step 3 of ")
    press(chromium, end)
    assert re.fullmatch(r"step (\d+) of \1", text(chromium, "#place"))
    press(chromium, home)
    chromium.find_element("id", "forward").click()
    assert text(chromium, "#place").startswith("step 2 of ")
    chromium.find_element("id", "slider").click()  # the slider has the focus: its own keys must not add to ours
    slide(chromium, 0)
    press(chromium, right)
    assert text(chromium, "#place").startswith("step 2 of ")
    press(chromium, " ")
    assert text(chromium, "#play") == "Pause"
    chromium.execute_async_script("setTimeout(arguments[0], 1300)")
    press(chromium, " ")
    assert text(chromium, "#play") == "Play"
    assert int(text(chromium, "#place").split()[1]) > 2


def test_two_runs_are_shown_in_step_with_their_first_difference(chromium: Any, page: Path) -> None:
    open_page(chromium, page)
    assert count(chromium, ".run") == 2
    document = json.loads(text(chromium, "#data"))
    place = next(place for place, sample in enumerate(document["samples"]) if sample["difference"])
    choose = "const s = document.getElementById('sample'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    chromium.execute_script(choose, place)
    button = chromium.find_element("id", "difference")
    frame = document["samples"][place]["difference"]["frame"]
    assert button.text == f"First difference: step {frame + 1}"
    assert count(chromium, ".text .apart") == 0
    button.click()
    assert text(chromium, "#place").startswith(f"step {frame + 1} of ")
    assert count(chromium, ".text .apart") > 0


def test_equal_texts_are_not_marked_as_a_difference(chromium: Any, tiny_model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "equal.html"
    path.write_text(trace_page(document_of([engine_of(tiny_model), engine_of(tiny_model)])), encoding="utf-8")
    open_page(chromium, path)
    button, other = chromium.find_element("id", "difference"), chromium.find_element("id", "play")
    assert (button.text, button.is_enabled()) == ("The texts are equal", False)
    assert button.value_of_css_property("color") == other.value_of_css_property("color")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_layout_holds(chromium: Any, page: Path, width: int, scheme: str) -> None:
    open_page(chromium, page, width=width, scheme=scheme)
    slide(chromium, 3)
    assert chromium.execute_script("return document.documentElement.scrollWidth") == width
    tops = chromium.execute_script(
        "return [...document.querySelectorAll('.block')].map((each) => each.getBoundingClientRect().top)"
    )
    assert (tops[0] == tops[1]) == (width == 1280)
    shades = background_shades(chromium)
    assert (max(shades) < 64) == (scheme == "dark")
    assert (min(shades) > 192) == (scheme == "light")


def test_nothing_decoded_is_said(chromium: Any, tiny_model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(trace_page(document_of([engine_of(tiny_model)], max_new_tokens=0)), encoding="utf-8")
    open_page(chromium, path)
    assert text(chromium, ".status") == "Nothing was decoded."


def test_generate_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.html"
    command = ["generate", "--model", str(GOLDEN), "--ids", "--prompt", "5 6 7", "--max-new-tokens", "20"]
    assert main([*command, "--rule", "trim", "--trace", str(path), "--trace-against", "none"]) == 0
    ids = [int(each) for each in capsys.readouterr().out.split()]
    data = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert data
    document = json.loads(data[1])
    assert document["engines"] == ["trim:level=changed,budget=4,settle=1,age=4", "no reuse"]
    assert document["samples"][0]["runs"][0]["ids"] == ids


def test_the_texts_of_tokens_make_up_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    ids = tokenizer.encode("<|user|>has 12 apples and buys 3 more.<|end|>")
    assert "".join(map(tokenizer.token_text, ids)) == "<|user|> has 12 apples and buys 3 more.<|end|>"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--trace-against", "none"], "--trace-against needs --trace"),
        (["--trace", "/no/such/folder/trace.html"], "no file can be written there"),
        (["--trace", "trace.html", "--trace-against", "trimm"], "nearest: trim"),
        (["--watch"], "--watch needs a terminal"),
        (["--watch", "-1"], "not a number of seconds"),
    ],
)
def test_wrong_use_is_one_line(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(GOLDEN), "--ids", "--prompt", "5", *options]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
