"""The words that problems are made of. Each word is a token, so this list is most of the vocabulary."""

NAMES = (
    "Ann", "Ben", "Dan", "Eva", "Ida", "Jim", "Leo", "Lia",
    "Max", "Mia", "Nina", "Paul", "Rosa", "Sam", "Tom", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "balls", "books", "cards", "coats", "cups", "eggs", "hats",
    "keys", "pears", "pens", "plums", "rings", "shells", "stamps", "toys",
)  # fmt: skip

ANIMALS = ("bird", "cat", "cow", "dog", "fish", "fox", "horse", "wolf")
FRUITS = ("apple", "cherry", "fig", "grape", "lemon", "melon", "peach", "plum")
COLORS = ("black", "blue", "brown", "gold", "green", "pink", "red", "white")
WORD_KINDS = {"animals": ANIMALS, "fruits": FRUITS, "colors": COLORS}
NOUNS = ANIMALS + FRUITS + COLORS
CLOSING_WORDS = ("done", "end", "over", "stop")
