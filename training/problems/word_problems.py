"""mini_gsm8k: word problems of two to five steps with a worked answer that ends in `#### 72`.

A problem is a story about somebody's things. Every step changes a two-digit number by a number of one or two digits.
The worked answer writes out each operation, so one wrong digit spoils everything after it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from training.problems.problem import Problem
from training.problems.words import NAMES, THINGS

TASK = "mini_gsm8k"
SMALLEST, LARGEST = 10, 99
FACTORS = range(2, 6)
LARGEST_FACTOR = 20  # of the other factor, and of a quotient
STEP_KINDS = ("gain", "lose", "split", "compare", "multiply")


@dataclass(frozen=True)
class Difficulty:
    """How long the stories are, and how large their numbers are."""

    step_counts: tuple[int, ...]
    largest_start: int
    addends: range
    large_addends: range = range(0)
    large_share: float = 0.0  # of the steps that add or take away

    def draw_addends(self, random: Random) -> range:
        return self.large_addends if self.large_share and random.random() < self.large_share else self.addends


EASY = Difficulty((2, 2, 3, 3, 4), largest_start=60, addends=range(2, 6))
SINGLE_DIGITS = Difficulty((2, 2, 3, 3, 4), largest_start=60, addends=range(2, 10))
HARD = Difficulty(
    (2, 3, 3, 4, 4, 5), largest_start=90, addends=range(2, 10), large_addends=range(10, 50), large_share=0.5
)


@dataclass
class Story:
    """A problem while it is being told: whose number it is, its current value, and the sentences so far."""

    owner: str
    friend: str
    thing: str
    value: int
    difficulty: Difficulty
    sentences: list[str] = field(default_factory=list)
    working: list[str] = field(default_factory=list)
    signature: list[str] = field(default_factory=list)
    handed_over: bool = False

    def calculate(self, operator: str, operand: int, *, subject: str, unit: str) -> None:
        left = self.value
        self.value = {"+": left + operand, "-": left - operand, "*": left * operand, "/": left // operand}[operator]
        self.working.append(f"{subject} {left} {operator} {operand} = {self.value} {unit}.")
        self.signature.append(f"{operator}{operand}")


def make_word_problem(random: Random, *, difficulty: Difficulty = HARD) -> Problem:
    owner, friend = random.sample(NAMES, 2)
    thing, start_value = random.choice(THINGS), random.randint(SMALLEST, difficulty.largest_start)
    story = Story(owner, friend, thing, start_value, difficulty)
    story.sentences.append(f"{owner} has {start_value} {thing}.")
    steps = random.choice(difficulty.step_counts)
    question = None
    while len(story.working) < steps:
        last = len(story.working) == steps - 1
        if last and question is None:
            question = _closing_step(story, random)
            if question is not None:
                continue
        _middle_step(story, random)
    question = question or f"How many {story.thing} does {story.owner} have now?"
    answer = " ".join(story.working) + f"\n#### {story.value}"
    prompt = " ".join([*story.sentences, question])
    document = {"question": prompt, "answer": answer, "steps": steps}
    return Problem(TASK, f"{start_value}{''.join(story.signature)}", prompt, answer, document)


def _middle_step(story: Story, random: Random) -> None:
    """Tries kinds of steps in random order until one keeps the number within bounds. A gain or a loss always does."""
    for kind in random.sample(STEP_KINDS, len(STEP_KINDS)):
        if kind == "gain" and _gain(story, random):
            return
        if kind == "lose" and _lose(story, random):
            return
        if kind == "split" and _split(story, random):
            return
        if kind == "compare" and not story.handed_over and _compare(story, random):
            return
        if kind == "multiply" and not story.handed_over and _multiply(story, random):
            return
    raise AssertionError(f"no step is possible from {story.value}")


def _closing_step(story: Story, random: Random) -> str | None:
    """A last step that asks for something other than what the owner has; None for an ordinary last step."""
    prices = _factors(story.value)
    if prices and random.random() < 0.4:
        price = random.choice(prices)
        story.sentences.append(f"{story.owner} sells them for {price} coins each.")
        story.calculate("*", price, subject=f"{story.owner} gets", unit="coins")
        return f"How many coins does {story.owner} get?"
    return None


def _gain(story: Story, random: Random) -> bool:
    possible = [n for n in story.difficulty.draw_addends(random) if story.value + n <= LARGEST]
    if not possible:
        return False
    n = random.choice(possible)
    story.sentences.append(f"{story.owner} {random.choice(('buys', 'finds', 'gets'))} {n} more.")
    story.calculate("+", n, subject=f"{story.owner} has", unit=story.thing)
    return True


def _lose(story: Story, random: Random) -> bool:
    possible = [n for n in story.difficulty.draw_addends(random) if story.value - n >= SMALLEST]
    if not possible:
        return False
    n = random.choice(possible)
    story.sentences.append(f"{story.owner} {random.choice(('loses', 'sells', 'gives away'))} {n}.")
    story.calculate("-", n, subject=f"{story.owner} has", unit=story.thing)
    return True


def _split(story: Story, random: Random) -> bool:
    possible = [n for n in FACTORS if story.value % n == 0 and SMALLEST <= story.value // n <= LARGEST_FACTOR]
    if not possible:
        return False
    n = random.choice(possible)
    story.sentences.append(f"{story.owner} splits them into {n} bags and keeps one.")
    story.calculate("/", n, subject=f"{story.owner} has", unit=story.thing)
    return True


def _compare(story: Story, random: Random) -> bool:
    addends = story.difficulty.draw_addends(random)
    more = [n for n in addends if story.value + n <= LARGEST]
    fewer = [n for n in addends if story.value - n >= SMALLEST]
    operator = random.choice("+-")
    possible = more if operator == "+" else fewer
    if not possible:
        return False
    n = random.choice(possible)
    _hand_over(story, f"{n} {'more' if operator == '+' else 'fewer'} than")
    story.calculate(operator, n, subject=f"{story.owner} has", unit=story.thing)
    return True


def _multiply(story: Story, random: Random) -> bool:
    possible = _factors(story.value)
    if not possible:
        return False
    n = random.choice(possible)
    _hand_over(story, f"{n} times as many as")
    story.calculate("*", n, subject=f"{story.owner} has", unit=story.thing)
    return True


def _hand_over(story: Story, relation: str) -> None:
    """Describes a friend by a relation to the owner, and goes on with the friend as the owner."""
    story.sentences.append(f"{story.friend} has {relation} {story.owner}.")
    story.owner, story.handed_over = story.friend, True


def _factors(value: int) -> list[int]:
    return [n for n in FACTORS if value <= LARGEST_FACTOR and value * n <= LARGEST]


def is_right(document: Mapping[str, Any], response: str) -> bool:
    """Whether the number after `####` is the document's answer."""
    found = re.search(r"#### *(\d+)", response)
    return found is not None and found[1] == document["answer"].rpartition("#### ")[2]
