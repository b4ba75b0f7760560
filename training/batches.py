"""From problems to the units of a step: token shift, loss weights, and masks as they occur in decoding."""

from dataclasses import dataclass
from functools import partial
from random import Random

from tokenizers import Tokenizer

from stepsaver.engine.errors import UsageError
from training.layout import NO_TARGET, Sheet, Units
from training.problems import instructions, questions, word_problems
from training.problems.problem import Maker, Problem, Split
from training.problems.tokenizer import END_ID, MASK_ID, prompt_text
from training.recipe import Recipe, Stage

MOST_BLOCKS = 4


@dataclass(frozen=True)
class Sample:
    """A problem as tokens, padded with stop tokens to whole blocks. The answer ends with its stop token."""

    tokens: list[int]
    answer_start: int
    answer_end: int  # after the stop token; what follows is padding
    block_size: int
    weight: float = 1.0  # of its loss

    @property
    def blocks(self) -> int:
        return len(self.tokens) // self.block_size

    def block(self, index: int) -> list[int]:
        return self.tokens[index * self.block_size : (index + 1) * self.block_size]

    def next_tokens(self, index: int) -> list[int]:
        """Returns what the rows of a block predict. After the last block nothing is known."""
        start = index * self.block_size + 1
        following = self.tokens[start : start + self.block_size]
        return [*following, *([NO_TARGET] * (self.block_size - len(following)))]


def encode(problem: Problem, tokenizer: Tokenizer, *, block_size: int, weight: float = 1.0) -> Sample:
    prompt = tokenizer.encode(prompt_text(problem.prompt)).ids
    tokens = [*prompt, *tokenizer.encode(problem.answer).ids, END_ID]
    end = len(tokens)
    tokens += [END_ID] * (-end % block_size)
    return Sample(tokens, len(prompt), end, block_size, weight)


def draw(random: Random, recipe: Recipe, *, step: int, split: Split) -> Problem:
    """Returns a problem of any task, with the tasks in the recipe's proportion."""
    share = recipe.word_problem_share(step)
    others = (1 - share) / 2
    makers: list[Maker] = [
        partial(word_problems.make_word_problem, difficulty=recipe.difficulty(step)),
        partial(questions.make_question, largest_addend=recipe.largest_addend(step)),
        instructions.make_instruction,
    ]
    make = random.choices(makers, (share, others, others))[0]
    while (problem := make(random)).split != split:
        pass
    return problem


def make_batch(recipe: Recipe, tokenizer: Tokenizer, *, step: int, stage: Stage, split: Split = "train") -> Units:
    """Returns the units of one step. They depend on seed and step alone, so a resumed run sees the same ones."""
    random = Random(f"{recipe.seed}:{split}:{step}")
    sheet = Sheet(recipe.block_size, MOST_BLOCKS)
    capacity = recipe.units(stage)
    while True:
        problem = draw(random, recipe, step=step, split=split)
        weight = 1.0 if problem.task == word_problems.TASK else recipe.short_weight
        sample = encode(problem, tokenizer, block_size=recipe.block_size, weight=weight)
        trial = Sheet(recipe.block_size, MOST_BLOCKS)
        add_sample(trial, sample, recipe, random, stage=stage)
        if len(sheet) + len(trial) > capacity:
            if not len(sheet):
                raise UsageError(f"{capacity} units of {recipe.block_size} rows do not hold a single problem")
            return sheet.units(capacity)
        _append(sheet, trial)


def _append(sheet: Sheet, other: Sheet) -> None:
    offset = len(sheet)
    sheet.tokens += other.tokens
    sheet.first_positions += other.first_positions
    sheet.contexts += [[number + offset for number in earlier] for earlier in other.contexts]
    sheet.causal += other.causal
    sheet.targets += other.targets
    sheet.weights += other.weights


def add_sample(sheet: Sheet, sample: Sample, recipe: Recipe, random: Random, *, stage: Stage) -> None:
    add_causal(sheet, sample, recipe)
    if stage == "joint":
        clean = add_clean(sheet, sample)
        first = sample.answer_start // sample.block_size
        for block in range(first, sample.blocks):
            for masked, weights in variants(sample, block, recipe, random):
                add_noisy(sheet, sample, block, masked, weights, earlier=clean[:block])


def add_causal(sheet: Sheet, sample: Sample, recipe: Recipe) -> None:
    earlier: list[int] = []
    for block in range(sample.blocks):
        start = block * sample.block_size
        weights = [_weight(sample, start + row + 1, recipe) for row in range(sample.block_size)]
        unit = sheet.add(
            sample.block(block),
            block=block,
            earlier=list(earlier),
            targets=sample.next_tokens(block),
            weights=weights,
            causal=True,
        )
        earlier.append(unit)


def add_clean(sheet: Sheet, sample: Sample) -> list[int]:
    """Adds the context of the noisy units, and returns its numbers. A block's last row predicts the next block's first
    token.
    """
    clean: list[int] = []
    for block in range(sample.blocks - 1):
        answer_follows = (block + 1) * sample.block_size >= sample.answer_start
        weights = [0.0] * sample.block_size
        weights[-1] = sample.weight * answer_follows
        unit = sheet.add(
            sample.block(block), block=block, earlier=list(clean), targets=sample.next_tokens(block), weights=weights
        )
        clean.append(unit)
    return clean


def add_noisy(
    sheet: Sheet, sample: Sample, block: int, masked: list[bool], weights: list[float], *, earlier: list[int]
) -> int:
    """Adds one variant of a block, and returns its number. A masked row's loss is at the row that predicts it."""
    tokens = [MASK_ID if hidden else token for token, hidden in zip(sample.block(block), masked, strict=True)]
    return sheet.add(
        tokens, block=block, earlier=list(earlier), targets=sample.next_tokens(block), weights=[*weights[1:], 0.0]
    )


def variants(sample: Sample, block: int, recipe: Recipe, random: Random) -> list[tuple[list[bool], list[float]]]:
    """Returns masks of one answer block, with the loss weight of every masked row.

    The first row of a block is never masked: it is part of the prompt, or decoding knows it from the block before.
    """
    start = block * sample.block_size
    first = max(sample.answer_start - start, 1)
    size = recipe.sub_block_size
    end = min(sample.answer_end - start, sample.block_size)
    sub_blocks = range(first // size, -(-end // size))
    if first >= end:  # nothing of the answer is left to decode after the row that is known
        return []
    chosen = random.sample(sub_blocks, min(recipe.variants, len(sub_blocks)))
    found = [_decoding_variant(sample, block, sub_block, first, recipe, random) for sub_block in chosen]
    if random.random() < recipe.complementary_share:
        found += _complementary_variants(sample, block, first, recipe, random)
    return found


def _decoding_variant(
    sample: Sample, block: int, sub_block: int, first: int, recipe: Recipe, random: Random
) -> tuple[list[bool], list[float]]:
    """Returns a mask that shows earlier sub-blocks, masks some of this one and all of the later ones."""
    size, rows = recipe.sub_block_size, sample.block_size
    current = range(max(first, sub_block * size), (sub_block + 1) * size)
    hidden = _hidden_rows(current, random)
    masked = [row in hidden or row >= current.stop for row in range(rows)]
    start = block * rows
    weights = [
        float(masked[row]) * (1.0 if row in current else recipe.later_weight) * _weight(sample, start + row, recipe)
        for row in range(rows)
    ]
    return masked, weights


def _hidden_rows(current: range, random: Random) -> set[int]:
    """Returns all rows, all from some row on, or any of them: decoding unmasks roughly from the left, but jumps."""
    kind = random.random()
    if kind < 0.25:
        return set(current)
    if kind < 0.6:
        return set(range(random.choice(current), current.stop))
    share = random.random()
    return {row for row in current if random.random() < share} or {random.choice(current)}


def _complementary_variants(
    sample: Sample, block: int, first: int, recipe: Recipe, random: Random
) -> list[tuple[list[bool], list[float]]]:
    """Fast-dLLM v2's masks: a random part of the block, and the rest of it, so that every token is learned once."""
    start, rows = block * sample.block_size, sample.block_size
    share = random.uniform(0.1, 0.9)
    part = [row >= first and random.random() < share for row in range(rows)]
    rest = [row >= first and not part[row] for row in range(rows)]
    return [
        (
            masked,
            [
                float(masked[row]) * recipe.complementary_weight * _weight(sample, start + row, recipe)
                for row in range(rows)
            ],
        )
        for masked in (part, rest)
    ]


def _weight(sample: Sample, position: int, recipe: Recipe) -> float:
    """Returns the loss weight of a token by its position: the answer counts, padding a little, the prompt not at all,
    nor what comes after the last block.
    """
    if position < sample.answer_start or position >= len(sample.tokens):
        return 0.0
    return sample.weight * (1.0 if position < sample.answer_end else recipe.padding_weight)
