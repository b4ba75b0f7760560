"""mini_mmlu: four-choice questions on eight subjects, scored by the log-likelihood of the choices.

A choice that is a letter, digit or name is one token. Other choices are several tokens, so that scoring along a
decoding trajectory takes several steps.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random

from training.problems.problem import Problem
from training.problems.words import NAMES, NOUNS

TASK = "mini_mmlu"
SMALLEST_ADDEND, LARGEST_ADDEND = 2, 5
LETTERS = ("A", "B", "C", "D")
UNITS = (
    ("weeks", "days", 7),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
    ("dimes", "cents", 10),
)


def make_question(random: Random, *, largest_addend: int = LARGEST_ADDEND) -> Problem:
    subject = random.choice(tuple(SUBJECTS))
    return _arithmetic(random, largest_addend) if subject == "arithmetic" else SUBJECTS[subject](random)


def _question(
    subject: str, text: str, right: str, wrong: list[str], random: Random, *, identity: str | None = None
) -> Problem:
    """Shuffles the choices. `identity` is the question without what rewording changes."""
    choices = [right, *wrong]
    assert len(set(choices)) == 4, choices
    random.shuffle(choices)
    return _problem(subject, text, choices, choices.index(right), identity or text)


def _lettered(subject: str, text: str, right: str, wrong: list[str], random: Random) -> Problem:
    """A question that lists its options; the choices are their letters."""
    options = [right, *wrong]
    random.shuffle(options)
    listed = " ".join(f"{letter}: {option}" for letter, option in zip(LETTERS, options, strict=True))
    identity = f"{text} {sorted(options)}"
    return _problem(subject, f"{text} {listed}", list(LETTERS), options.index(right), identity)


def _problem(subject: str, text: str, choices: list[str], answer: int, identity: str) -> Problem:
    document = {"subject": subject, "question": text, "choices": choices, "answer": answer}
    return Problem(TASK, f"{subject}:{identity}", text, choices[answer], document)


def _near(number: int, random: Random) -> list[int]:
    """Three wrong numbers near the right one and with as many digits: off by a little or by tens."""
    offsets = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)
    digits = len(str(number))
    return random.sample([number + o for o in offsets if number + o > 0 and len(str(number + o)) == digits], 3)


def _arithmetic(random: Random, largest_addend: int = LARGEST_ADDEND) -> Problem:
    left, right = random.randint(10, 89), random.choice(range(SMALLEST_ADDEND, largest_addend + 1))
    operator = random.choice("+-") if left - right >= 10 else "+"
    result = left + right if operator == "+" else left - right
    texts = [f"{left} {operator} {right} = {number}" for number in (result, *_near(result, random))]
    return _question("arithmetic", f"What is {left} {operator} {right}?", texts[0], texts[1:], random)


def _comparison(random: Random) -> Problem:
    numbers = sorted(random.sample(range(10, 100), 4))
    largest = random.random() < 0.5
    right = numbers.pop(-1 if largest else 0)
    text = f"Which number is the {'largest' if largest else 'smallest'}?"
    return _lettered("comparison", text, str(right), [str(number) for number in numbers], random)


def _ordering(random: Random) -> Problem:
    numbers = random.sample(range(10, 100), 4)
    right = ", ".join(str(number) for number in sorted(numbers))
    orders = {right}
    while len(orders) < 4:
        orders.add(", ".join(str(number) for number in random.sample(numbers, 4)))
    text = f"Put in order: {', '.join(str(number) for number in numbers)}."
    identity = str(sorted(numbers))
    return _question("ordering", text, right, sorted(orders - {right}), random, identity=identity)


def _counting(random: Random) -> Problem:
    word, *others = random.sample(NOUNS, 3)
    count = random.randint(1, 5)
    listed = [word] * count + random.choices(others, k=random.randint(2, 4))
    random.shuffle(listed)
    wrong = [str(number) for number in range(1, 7) if number != count]
    text = f"How many times is {word} in the list: {', '.join(listed)}?"
    return _question("counting", text, str(count), random.sample(wrong, 3), random)


def _units(random: Random) -> Problem:
    large, small, size = random.choice(UNITS)
    many = random.randint(2, 90 // size)
    rest = random.randint(1, min(size - 1, 99 - many * size))
    total = many * size + rest
    name = random.choice(NAMES)
    text = f"{name} has {many} {large} and {rest} {small}. How many {small} is that?"
    texts = [f"It is {number} {small}." for number in (total, *_near(total, random))]
    return _question("units", text, texts[0], texts[1:], random, identity=f"{many} {large} {rest} {small}")


def _logic(random: Random) -> Problem:
    """Three comparisons in any order put four people in a row. Who is first or last in it?"""
    people = random.sample(NAMES, 4)
    taller = list(pairwise(people))
    random.shuffle(taller)
    tallest = random.random() < 0.5
    right = people[0] if tallest else people[-1]
    facts = " ".join(f"{one} is taller than {other}." for one, other in taller)
    text = f"{facts} Who is the {'tallest' if tallest else 'shortest'}?"
    identity = f"{'-'.join(people)} {tallest}"
    return _question("logic", text, right, [name for name in people if name != right], random, identity=identity)


def _pattern(random: Random) -> Problem:
    difference = random.randint(2, 9)
    first = random.randint(10, 99 - 4 * difference)
    numbers = [first + i * difference for i in range(5)]
    listed = ", ".join(str(number) for number in numbers[:4])
    wrong = [str(number) for number in _near(numbers[4], random)]
    return _question("pattern", f"What comes next: {listed}?", str(numbers[4]), wrong, random)


def _parity(random: Random) -> Problem:
    even = random.random() < 0.5
    numbers = range(10, 100)
    right = random.choice([n for n in numbers if (n % 2 == 0) == even])
    wrong = random.sample([n for n in numbers if (n % 2 == 0) != even], 3)
    text = f"Which number is {'even' if even else 'odd'}?"
    return _lettered("parity", text, str(right), [str(number) for number in wrong], random)


SUBJECTS: dict[str, Callable[[Random], Problem]] = {
    "arithmetic": _arithmetic,
    "comparison": _comparison,
    "counting": _counting,
    "logic": _logic,
    "ordering": _ordering,
    "parity": _parity,
    "pattern": _pattern,
    "units": _units,
}
