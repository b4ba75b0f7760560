"""What a model promises when its calls overlap or break off: threads, open streams, Ctrl-C and forks."""

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stepsaver
from stepsaver.engine.batch import BatchContext
from stepsaver.engine.cache import KeyValueCache
from stepsaver.engine.state import Sample

QUESTIONS = [
    "Tom has 12 pens and buys 5 more pens. How many pens does Tom have?",
    "What is 3 + 4?",
    "Mia has 20 books and gives 7 books to Leo. How many books does Mia have?",
    "Write two words.",
]
RULES = [(), "layer_reuse:k=2", ("suffix_dropout", "trim"), "trim:level=drift"]
Call = Callable[[stepsaver.Model, int], Any]


def _texts(model: stepsaver.Model, number: int) -> Any:
    two = [QUESTIONS[number % 4], QUESTIONS[(number + 1) % 4]]
    return model.generate(two, rules=RULES[number % 4], max_new_tokens=16 + number % 3)


def _ids(model: stepsaver.Model, number: int) -> Any:
    return model.generate(QUESTIONS[number % 4], ids=True, temperature=0.8, seed=number % 5, max_new_tokens=24)


def _stream(model: stepsaver.Model, number: int) -> Any:
    texts = ["", ""]
    two = [QUESTIONS[number % 4], QUESTIONS[(number + 2) % 4]]
    for piece in model.stream(two, rules=RULES[number % 4], max_new_tokens=20, batch_size=1 + number % 2):
        texts[piece.prompt] += piece.text
    return texts


def _scores(model: stepsaver.Model, number: int) -> Any:
    pairs = [(QUESTIONS[number % 4], " 17 pens"), (QUESTIONS[(number + 1) % 4], " 7")]
    estimator = ("trajectory", "autoregressive")[number % 2]
    return model.score(pairs, rules=RULES[number % 4] if number % 2 == 0 else (), estimator=estimator)  # type: ignore[arg-type]


CALLS: list[Call] = [_texts, _ids, _stream, _scores]
DIFFERENT = 60  # calls after which they repeat: every kind, question, rule, seed and length


@pytest.fixture(scope="module")
def expected(embedded: stepsaver.Model) -> list[Any]:
    return [CALLS[number % 4](embedded, number // 4) for number in range(4 * DIFFERENT)]


def _ask(model: stepsaver.Model, number: int) -> Any:
    number %= 4 * DIFFERENT
    return CALLS[number % 4](model, number // 4)


@pytest.mark.parametrize("calls", [64, pytest.param(2000, marks=pytest.mark.long)])
def test_every_thread_gets_its_own_answers(embedded: stepsaver.Model, expected: list[Any], calls: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: _ask(embedded, number), range(calls)))
    wrong = [number for number, each in enumerate(found) if each != expected[number % len(expected)]]
    assert not wrong


@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.long)])
def test_an_interrupted_call_leaves_the_next_one_right(
    embedded: stepsaver.Model, expected: list[Any], times: int
) -> None:
    """Ctrl-C at random moments of every kind of call, the encoding of prompts included."""
    draw = random.Random(times)
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 0.03))
                for each in range(number, number + 50):
                    _ask(embedded, each)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert _ask(embedded, number) == expected[number % len(expected)]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == times


def test_open_streams_and_other_calls_do_not_wait_for_each_other(
    embedded: stepsaver.Model, expected: list[Any]
) -> None:
    unread = embedded.stream(QUESTIONS, max_new_tokens=64)
    next(unread)
    first = embedded.stream(QUESTIONS[0], max_new_tokens=24)
    second = embedded.stream(QUESTIONS[2], max_new_tokens=24)
    texts, inside = ["", ""], []
    for one, other in zip(first, second, strict=False):
        texts[0] += one.text
        texts[1] += other.text
        inside.append(_ask(embedded, len(inside)))  # calls of every kind, while three streams are open
    texts = [texts[0] + "".join(each.text for each in first), texts[1] + "".join(each.text for each in second)]
    assert len(inside) >= 2
    assert inside == expected[: len(inside)]
    alone = [embedded.generate(each, max_new_tokens=24) for each in (QUESTIONS[0], QUESTIONS[2])]
    assert [text[: len(own)] for text, own in zip(texts, alone, strict=True)] == alone
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(_ask, embedded, 1).result(timeout=60) == expected[1]
        assert len([piece for piece in unread if piece.is_last]) == len(QUESTIONS)


def _caches() -> int:
    gc.collect()
    return sum(type(each) is KeyValueCache for each in gc.get_objects())


def test_a_stream_that_is_left_frees_its_caches(embedded: stepsaver.Model) -> None:
    def open_one() -> Iterator[Any]:
        stream = embedded.stream(QUESTIONS, max_new_tokens=64)
        next(stream)
        return stream

    before = _caches()
    stream: Any = open_one()
    assert _caches() == before + 1
    stream.close()
    assert _caches() == before
    assert list(stream) == []
    stream = open_one()
    with pytest.raises(KeyError, match="mine"):
        stream.throw(KeyError("mine"))
    assert _caches() == before
    stream = open_one()
    del stream
    assert _caches() == before


def _alive() -> dict[str, int]:
    gc.collect()
    kinds = (KeyValueCache, Sample, torch.Tensor, BatchContext)
    return {kind.__name__: sum(type(each) is kind for each in gc.get_objects()) for kind in kinds}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_calls_leave_nothing_behind(embedded: stepsaver.Model, expected: list[Any]) -> None:
    _ask(embedded, 0)
    before = _alive()
    for number in range(200):
        assert _ask(embedded, number) == expected[number]
    assert _alive() == before


@pytest.mark.long
def test_memory_is_flat_over_20000_calls(tiny_folder: Path) -> None:
    """Texts of ever new words and lengths, so that nothing is asked twice; what caches keep is full long before."""
    model = stepsaver.load(tiny_folder)
    rules = [(), "layer_reuse:k=2", "trim", "trim:level=drift"]
    resident = []
    for number in range(20_000):
        text = f"{number} " * (1 + number % 7)
        kind = number % 4
        if kind == 0:
            model.generate([text, "x" * (number % 50)], rules=rules[number // 4 % 4], max_new_tokens=6)
        elif kind == 1:
            model.generate(text, ids=True, temperature=1.0, seed=number, max_new_tokens=6)
        elif kind == 2:
            next(model.stream(text, max_new_tokens=12))  # left open
        else:
            model.score([(text, " answer"), (text, f" {number}")])
        if number % 5000 == 4999:
            gc.collect()
            resident.append(_resident())
    assert max(resident) - resident[0] < 8 << 20


FORKING = """
import os, sys, time
import stepsaver

model = stepsaver.load("embedded")
question = "Tom has 12 pens and buys 5 more pens. How many pens does Tom have?"
ask = lambda: model.generate([question] * 4)
expected = ask()
stream = model.stream(question)
next(stream)
uses = [ask, lambda: stepsaver.load("embedded"), lambda: list(stream), lambda: model.score([("3 + 4 =", " 7")])]
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        try:
            uses[number % 4]()
        except stepsaver.UsageError as error:
            os._exit(0 if "forked" in str(error) and "\\n" not in str(error) else 1)
        os._exit(2)
    started = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > started + 30:
            os.kill(child, 9)
            os.waitpid(child, 0)
            sys.exit("hung")
        time.sleep(0.002)
    assert ended[1] == 0, ended
    assert ask() == expected
"""


@pytest.mark.parametrize("forks", [2, pytest.param(50, marks=pytest.mark.long)])
def test_a_forked_process_refuses_in_one_line(forks: int) -> None:
    """Two threads, as most users have them: their pool does not survive a fork, and waiting for it would not end."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FORKING, str(forks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), "not even of the stream that is open at the end"


def test_a_process_forked_before_any_model_was_loaded_works() -> None:
    script = (
        "import os, stepsaver\n"
        "child = os.fork()\n"
        "if child: raise SystemExit(os.waitpid(child, 0)[1])\n"
        "model = stepsaver.load('embedded')\n"
        f"print(model.generate({QUESTIONS[0]!r}))\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "17" in done.stdout


def test_threads_start_without_waiting_for_an_unread_stream(embedded: stepsaver.Model, expected: list[Any]) -> None:
    """A stream that one thread opened can be read by another."""
    stream = embedded.stream(QUESTIONS[0], max_new_tokens=24)
    texts = [next(stream).text]
    reader = threading.Thread(target=lambda: texts.extend(piece.text for piece in stream))
    reader.start()
    assert _ask(embedded, 2) == expected[2]
    reader.join(timeout=60)
    assert "".join(texts) == embedded.generate(QUESTIONS[0], max_new_tokens=24)
