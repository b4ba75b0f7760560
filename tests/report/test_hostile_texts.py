"""Every page in a real browser, with texts of a model or of a file that try to leave their place."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsaver.bench.audit import Finding
from stepsaver.engine.models.transformer import Transformer
from stepsaver.report.cells import ReportCell
from stepsaver.report.experiment_page import experiment_page
from stepsaver.report.html_pages import trace_page
from stepsaver.report.overview import Overview, Pending, overview_page
from stepsaver.report.tuning_page import tuning_page
from tests.report.browsing import count, open_page, show
from tests.report.reports import made_up_experiment, made_up_task
from tests.report.test_tuning_page import document as tuning_document
from tests.report.traces import document_of, engine_of

BROKEN = "window.broken=1"
PIECES = [
    f"<script>{BROKEN}</script>", "</script>", "</style>", "</title>", "</textarea>", "<!--", "-->", "]]>", "<![CDATA[",
    f"<img src=x onerror={BROKEN}>", f"<svg/onload={BROKEN}>", f"<iframe srcdoc='<script>parent.{BROKEN}</script>'>",
    f"<a href='javascript:{BROKEN}'>a</a>", f"<body onload={BROKEN}>", "<style>@import 'x';*{color:red}</style>",
    "<base href=x:>", f"<meta http-equiv=refresh content='0;url=javascript:{BROKEN}'>", "<b>", "<extra>",
    f"<form action=javascript:{BROKEN}>", f"'+({BROKEN})+'", f'"+({BROKEN})+"', f"`${{{BROKEN}}}`", "${x}", "%{x}",
    "{{ data }}", "{% raw %}", "&lt;", "&#60;script&#62;", "\\u003cscript\\u003e", "\\", "\\'", "\u2028", "\u2029",
    "\u202e", "\ufeff", "\x00", "\x0b", "\x1b[2J", "\r", "\n", "\ud7ff", "\U0001f600", "a\u0301" * 50, "x" * 3000,
    " ", "__proto__", "constructor", "null", "NaN",
]  # fmt: skip
ESCAPED = (
    "main img, main script, main b, main iframe, main form, main base, main style, main meta, .plot a, body [onload]"
)


def drawn_text(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(1, 6)))


def report_pages(draw: random.Random, folder: Path) -> list[str]:
    def text(*_: object) -> str:
        return drawn_text(draw)

    experiment = made_up_experiment(folder / "hostile")
    experiment = replace(experiment, spec=experiment.spec.model_copy(update={"question": text()}))
    task = made_up_task(
        experiment,
        samples=6,
        answer=text,
        question=text,
        subjects=[text(), text()],
        findings=[Finding(level, "samples", text()) for level in ("invalid", "remark", "disturbed")],
        unfinished={"k3_last": ReportCell(experiment.configs[-1], "failed", text())},
    )
    tuned = tuning_document(
        question=text(), model=text(), task=text(), sentence=text(), never_run=[text(), text()],
        parallelism=[{"name": text(), "tokens_per_step": 2.0, "tokens_per_forward": 1.5}] * 2,
    )  # fmt: skip
    tuned["attempts"][0]["name"] = text()
    tuned["recipe"] |= {"rules": [text()], "policy": text()}
    overview = Overview([task], [Pending("high", text())], [text()])
    return [
        experiment_page(experiment, [task], others={task.folder: made_up_task(experiment)}, other_name=text()),
        tuning_page(tuned),
        overview_page(overview),
    ]


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.long)])
def test_no_text_leaves_its_place(rounds: int, chromium: Any, tiny_model: Transformer, tmp_path: Path) -> None:
    draw = random.Random(rounds)
    path = tmp_path / "page.html"
    for number in range(rounds):
        texts = [drawn_text(draw) for _ in range(60)]
        trace = trace_page(document_of([engine_of(tiny_model)], text=lambda token, texts=texts: texts[token % 60]))
        for page in [trace, *report_pages(draw, tmp_path)]:
            path.write_text(page, encoding="utf-8")
            (open_page if page is trace else show)(chromium, path)
            assert chromium.execute_script("return window.broken === undefined"), number
            assert count(chromium, ESCAPED) == 0, number
            assert chromium.get_log("browser") == [], number
