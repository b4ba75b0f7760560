"""The live view in the terminal."""

import io
import json
import os
import pty
import subprocess
import sys
from itertools import pairwise

import pytest
from rich.console import Console

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.models.transformer import Transformer
from stepsaver.report.watch import Watch
from stepsaver.report.watch import _legend as watch_legend
from tests.conftest import GOLDEN
from tests.report.traces import PROMPTS, engine_of

RULES = [
    (),
    ("window", "trim"),
    ("suffix_dropout",),
    ("layer_reuse:k=3,layers=last,mode=output",),
    ("layer_reuse:k=2,mode=mlp",),
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules) or "none")
def test_every_step_can_be_shown(tiny_model: Transformer, rules: tuple[str, ...]) -> None:
    engine = engine_of(tiny_model, *rules)
    console = Console(file=io.StringIO(), width=80, height=24, record=True)
    watch = Watch(engine, len(PROMPTS), lambda token: f"[red]{token}\x1b[2J\n", console=console)
    shown: list[str] = []

    def show(event: StepEvent) -> None:
        console.print(watch.view(event))
        shown.append(console.export_text())

    completions = list(engine.generate(PROMPTS, max_new_tokens=20, on_step=show))
    assert len(shown) == sum(step.kind in ("full", "sub", "reused") for each in completions for step in each.steps)
    for each in shown:
        assert "\x1b" not in each  # what a model writes is no order to the terminal
        assert len(each.splitlines()) < 24
    assert "[red]" in shown[0]
    rows = 4 if rules == ("suffix_dropout",) else 8
    assert shown[0].startswith(f"sample 1 of 3 · block at position 0 · full step · {rows} positions · ")
    assert shown[-1].splitlines()[-1].startswith("20 tokens · ")


def test_rows_that_are_not_there_yet_have_a_mark_of_their_own(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model, "suffix_dropout")
    console = Console(file=io.StringIO(), width=80, height=24, record=True)
    watch = Watch(engine, len(PROMPTS), str, console=console)
    lines: dict[int, list[str]] = {}

    def show(event: StepEvent) -> None:
        console.print(watch.view(event))
        marked = [
            line for line in console.export_text().splitlines() if line.lstrip().startswith(("position ", "layer"))
        ]
        lines.setdefault(event.plan.hidden, []).extend(marked)

    list(engine.generate(PROMPTS, max_new_tokens=20, on_step=show))
    assert lines.keys() == {0b11110000, 0}
    assert all(line.count("┄") == 4 and line.rstrip().endswith("┄") for line in lines[0b11110000])
    assert not any("┄" in line for line in lines[0])
    legend = watch_legend()
    assert "┄ not there yet" in legend
    assert len(legend) <= 80


@pytest.mark.parametrize("text", ["speculative:positions=0,span=4", "speculative:positions=9,context=block"])
def test_drafts_and_their_verification_can_be_shown(tiny_model: Transformer, text: str) -> None:
    engine = engine_of(tiny_model, decoder=parse_decoder(text))
    console = Console(file=io.StringIO(), width=80, height=24, record=True)
    watch = Watch(engine, len(PROMPTS), str, console=console)
    shown: dict[str, list[str]] = {}

    def show(event: StepEvent) -> None:
        console.print(watch.view(event))
        lines = console.export_text().splitlines()
        (marks,) = (line for line in lines if line.lstrip().startswith("position "))
        rejected = marks.count("✗")
        drafted = event.masked.bit_count() - 1
        assert rejected == (max(0, drafted - event.unmasked.bit_count()) if "verif" in lines[0] else 0)
        assert sum(" accepted: " in line for line in lines) == len(event.branches)
        shown.setdefault(lines[0].split(" · ")[2], []).append(marks)

    list(engine.generate(PROMPTS, max_new_tokens=20, on_step=show))
    assert shown.keys() == ({"draft", "verification"} if "positions=0" in text else {"verification"})
    assert any("✗" in line for line in shown["verification"])


def test_one_sample_is_followed_to_its_end(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    seen: list[int] = []

    class Seen(Watch):
        def view(self, event: StepEvent):  # type: ignore[no-untyped-def]
            seen.append(event.sample.index)
            return super().view(event)

    with Seen(engine, len(PROMPTS), str, console=Console(file=io.StringIO())) as watch:
        list(engine.generate(PROMPTS, max_new_tokens=20, on_step=watch))
    assert seen[0] == 0
    changes = sum(one != other for one, other in pairwise(seen))
    assert changes == len(set(seen)) - 1


def test_watching_shows_steps_on_a_terminal_and_counts_no_time() -> None:
    terminal, ours = pty.openpty()
    command = [sys.executable, "-m", "stepsaver", "generate", "--model", str(GOLDEN), "--ids", "--prompt", "5 6 7"]
    command += ["--max-new-tokens", "8", "--watch", "0.2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=ours, text=True)
    os.close(ours)
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    out, _ = process.communicate(timeout=120)
    os.close(terminal)
    assert process.returncode == 0, shown
    assert "sample 1 of 1" in shown.decode()
    document = json.loads(out)
    steps = len(document["samples"][0]["forwards"])
    assert document["throughput"]["decode_seconds"] < 0.2 * steps


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""
