"""The words that problems are made of. Each word is a token, so this list is most of the vocabulary."""

from stepsaver.evaluation.embedded.instructions import ANIMALS, COLORS, FRUITS

NAMES = (
    "Ann", "Ben", "Dan", "Eva", "Ida", "Jim", "Leo", "Lia",
    "Max", "Mia", "Nina", "Paul", "Rosa", "Sam", "Tom", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "balls", "books", "cards", "coats", "cups", "eggs", "hats",
    "keys", "pears", "pens", "plums", "rings", "shells", "stamps", "toys",
)  # fmt: skip

NOUNS = ANIMALS + FRUITS + COLORS
CLOSING_WORDS = ("done", "end", "over", "stop")
