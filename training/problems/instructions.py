"""mini_ifeval: short instructions; a program can check whether they were followed.

The checker (`stepsaver.evaluation.embedded.instructions`) looks at the response and does not compare it with one
expected text.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from stepsaver.evaluation.embedded.instructions import WORD_KINDS, obeys
from training.problems.problem import Problem
from training.problems.words import CLOSING_WORDS, NOUNS

TASK = "mini_ifeval"


def make_instruction(random: Random) -> Problem:
    return KINDS[random.choice(tuple(KINDS))](random)


def _problem(kind: str, prompt: str, answer: str, **arguments: Any) -> Problem:
    document = {"kind": kind, "prompt": prompt, "arguments": arguments}
    assert obeys(kind, arguments, answer), (kind, prompt, answer)
    return Problem(TASK, prompt, prompt, answer, document)


def _listed(items: list[Any]) -> str:
    return ", ".join(str(item) for item in items)


def _repeat(random: Random) -> Problem:
    word, times, closing = random.choice(NOUNS), random.randint(2, 6), random.choice((*CLOSING_WORDS, None))
    ending = f" and end with the word {closing}" if closing else ""
    words = [word] * times + ([closing] if closing else [])
    prompt = f"Write the word {word} {times} times{ending}."
    return _problem("repeat", prompt, " ".join(words), word=word, times=times, closing=closing)


def _reverse(random: Random) -> Problem:
    words = random.sample(NOUNS, random.randint(3, 4))
    return _problem("reverse", f"Reverse the list: {_listed(words)}.", _listed(words[::-1]), words=words)


def _parity(random: Random) -> Problem:
    remainder = random.randint(0, 1)
    numbers = random.sample(range(10, 100), 5)
    while not 0 < sum(n % 2 == remainder for n in numbers) < 5:
        numbers = random.sample(range(10, 100), 5)
    prompt = f"Write only the {('even', 'odd')[remainder]} numbers: {_listed(numbers)}."
    answer = _listed([n for n in numbers if n % 2 == remainder])
    return _problem("parity", prompt, answer, numbers=numbers, remainder=remainder)


def _kind(random: Random) -> Problem:
    kind = random.choice(tuple(WORD_KINDS))
    others = [word for word in NOUNS if word not in WORD_KINDS[kind]]
    words = random.sample(WORD_KINDS[kind], random.randint(1, 3)) + random.sample(others, 2)
    random.shuffle(words)
    answer = _listed([word for word in words if word in WORD_KINDS[kind]])
    return _problem("kind", f"Write only the {kind}: {_listed(words)}.", answer, words=words, wanted=kind)


def _close(random: Random) -> Problem:
    words, closing = random.sample(NOUNS, random.randint(2, 4)), random.choice(CLOSING_WORDS)
    prompt = f"Write the list {_listed(words)} and end with the word {closing}."
    return _problem("close", prompt, _listed([*words, closing]), words=words, closing=closing)


def _first(random: Random) -> Problem:
    words = random.sample(NOUNS, 5)
    count = random.randint(2, 4)
    prompt = f"Write the first {count} words: {_listed(words)}."
    return _problem("first", prompt, _listed(words[:count]), words=words, count=count)


def _count(random: Random) -> Problem:
    start, steps = random.randint(1, 93), random.randint(2, 5)
    stop = start + steps
    numbers = list(range(start, stop + 1))
    return _problem("count", f"Count from {start} to {stop}.", _listed(numbers), start=start, stop=stop)


def _dashes(random: Random) -> Problem:
    words = random.sample(NOUNS, random.randint(3, 5))
    return _problem("dashes", f"Write the list {_listed(words)} with dashes.", " - ".join(words), words=words)


def _without(random: Random) -> Problem:
    words = random.sample(NOUNS, random.randint(3, 5))
    dropped = random.choice(words)
    prompt = f"Write the list {_listed(words)} without {dropped}."
    answer = _listed([word for word in words if word != dropped])
    return _problem("without", prompt, answer, words=words, dropped=dropped)


KINDS: dict[str, Callable[[Random], Problem]] = {
    "close": _close,
    "count": _count,
    "dashes": _dashes,
    "first": _first,
    "kind": _kind,
    "parity": _parity,
    "repeat": _repeat,
    "reverse": _reverse,
    "without": _without,
}
