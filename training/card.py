"""The training card: what the checkpoint is, how it was made, how its loss went and how often it is right."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stepsaver.engine.models.load import load_model
from training.loop import Run, read_log
from training.measure import (
    Accuracy,
    checkpoint_tokenizer,
    measure_choices,
    measure_generation,
    percentage,
)
from training.problems import instructions, questions, word_problems
from training.problems.catalog import EVALUATION_FILES, LARGE
from training.problems.word_problems import EASY, HARD
from training.recipe import Recipe

THRESHOLDS = (1.0, 0.95, 0.9, 0.7, None)  # None: autoregressive, blocks of one row
CURVE_FILE = "loss_curve.png"
DEFAULTS = Recipe()


def write_card(folder: Path, out: Path, run: Run) -> None:
    """Measures the checkpoint in `folder` on every test problem and writes its README and loss curve."""
    model = load_model(folder, dtype=torch.float32)
    tokenizer = checkpoint_tokenizer(folder)
    generated = {
        (task, threshold): measure_generation(model, tokenizer, task, threshold=threshold)
        for task in (word_problems.TASK, instructions.TASK)
        for threshold in THRESHOLDS
    }
    choices = measure_choices(model, tokenizer)
    timed = measure_generation(model, tokenizer, word_problems.TASK, threshold=0.9, batch=32)
    lines = read_log(out)
    draw_curve(lines, folder / CURVE_FILE)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = card_text(run, lines, generated, choices, timed, parameters=parameters)
    (folder / "README.md").write_text(text, encoding="utf-8")


def draw_curve(lines: list[dict[str, Any]], path: Path) -> None:
    """Both losses of every step, and those on the held-out batch."""
    import matplotlib  # only the card needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    joint = [line for line in lines if line["stage"] == "joint"]
    axes.plot(*_series(lines, "autoregressive"), color="tab:blue", linewidth=0.6, alpha=0.6, label="causal")
    axes.plot(*_series(joint, "diffusion"), color="tab:orange", linewidth=0.6, alpha=0.6, label="diffusion")
    checks = [{"step": line["step"], **line["held_out"]} for line in lines if "held_out" in line]
    axes.plot(*_series(checks, "autoregressive"), "o-", color="tab:blue", markersize=2.5, label="causal, held out")
    later = [check for check in checks if joint and check["step"] >= joint[0]["step"]]
    axes.plot(*_series(later, "diffusion"), "o-", color="tab:orange", markersize=2.5, label="diffusion, held out")
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per weighted token)")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [line["step"] for line in lines], [max(line[name], 1e-5) for line in lines]


def card_text(
    run: Run,
    lines: list[dict[str, Any]],
    generated: dict[tuple[str, float | None], Accuracy],
    choices: dict[str, Accuracy],
    timed: Accuracy,
    *,
    parameters: int,
) -> str:
    recipe = run.recipe
    held_out = [line["held_out"] for line in lines if "held_out" in line][-1]
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in asdict(recipe).items()
        if value != getattr(DEFAULTS, name) and not isinstance(value, tuple)
    ]
    rates = ", then ".join(f"{rate:g} from step {start}" for start, rate in recipe.rates)
    command = " ".join(["python -m training --out runs/train --export runs/model", *changed])
    return f"""# The embedded model: a block-diffusion language model of {parameters / 1e6:.1f} million parameters

It has the format and the structure of Fast-dLLM v2 ({recipe.layers} layers, blocks of {recipe.block_size} rows,
sub-blocks of {recipe.sub_block_size}, token shift) and is {recipe.hidden} wide: {recipe.heads} heads of
{recipe.hidden // recipe.heads}, MLP {recipe.mlp}, {run.model.config.vocab} tokens, tied embeddings. It solves the three
embedded tasks and knows nothing else. Words that no task uses are unknown tokens; the template renders a system
message, and no training sample had one.

## Accuracy

Plain decoding (block cache on, no reuse), greedy, float32, all test problems; 95 % Wilson intervals.
`autoregressive` decodes the same weights causally, blocks of one row. Tokens per step are unmasked rows per denoising
step of a sample; commits do not count. All of {word_problems.TASK} at threshold 0.9 and batch 32 took
{timed.seconds:.0f} seconds on {recipe.threads} cores that other work shared.

| threshold | {word_problems.TASK} ({EVALUATION_FILES[word_problems.TASK].count}) | tokens per step | \
{instructions.TASK} ({EVALUATION_FILES[instructions.TASK].count}) | tokens per step |
|---|---|---|---|---|
{chr(10).join(_threshold_row(threshold, generated) for threshold in THRESHOLDS)}

{questions.TASK} ({EVALUATION_FILES[questions.TASK].count} questions, four choices, chance 25 %), by the
log-likelihood of the choices along the decoding trajectory:

| subject | accuracy |
|---|---|
{chr(10).join(f"| {subject} | {percentage(accuracy)} |" for subject, accuracy in choices.items())}

## Data

Problems come from the seeded generator in `training/problems`. Word problems are
{100 * recipe.autoregressive_word_problem_share:.0f} % of the first stage and
{100 * recipe.joint_word_problem_share:.0f} % of the second, the other two tasks share the rest; their answers, a fifth
as long, weigh {recipe.short_weight:g} times as much. A problem belongs to training or test by a hash of what it asks
(for a word problem the calculation, whatever the names and things), so no test problem and no rewording of one was
trained on. `{LARGE}` has {EVALUATION_FILES[LARGE].count} more word problems of another seed, none of them with
a calculation of {word_problems.TASK}: enough to tell one point from none.

No sample is longer than {4 * recipe.block_size} tokens. Word problems get harder in the end: addends up to
{recipe.early_largest_addend} in the first {recipe.early_steps} steps, up to {EASY.addends[-1]} until step
{recipe.hard_start}, then as in the test two to five steps with half of the addends from {HARD.large_addends[0]} to
{HARD.large_addends[-1]}; word problems are then {100 * recipe.hard_word_problem_share:.0f} % of the problems.

## Training

{recipe.autoregressive_steps} steps with the causal loss on {recipe.autoregressive_units} blocks of rows each, then
{recipe.joint_steps} steps with the causal and the diffusion loss on {recipe.joint_units} blocks. Each answer block
stands in up to {recipe.variants} noisy variants masked as in decoding (earlier sub-blocks shown, part of one masked,
later ones masked), and {100 * recipe.complementary_share:.0f} % of them also in a pair of complementary random masks
(Fast-dLLM v2). Loss on the answer, on the block's padding after the stop token with weight {recipe.padding_weight}.
AdamW with a rate of
{rates};
from step {recipe.decay_start} to {recipe.hard_start} times the beginning of a cosine of {recipe.decay_steps} steps,
over the last {recipe.finish_steps} steps a straight line to 0. {run.seconds / 60:.0f} minutes of wall-clock time on
{recipe.threads} CPU cores that other work shared and sometimes stopped.

On the held-out batch at the end: causal loss {held_out["autoregressive"]:.4f} \
({100 * held_out["autoregressive_right"]:.1f} % of the tokens right), diffusion loss {held_out["diffusion"]:.4f} \
({100 * held_out["diffusion_right"]:.1f} %).

![loss by step]({CURVE_FILE})

Repeat it (saves every {recipe.save_every} steps; `--resume` goes on; a passive OpenMP wait keeps the speed when other
work shares the cores):

```
OMP_WAIT_POLICY=passive {command}
```
"""


def _threshold_row(threshold: float | None, generated: dict[tuple[str, float | None], Accuracy]) -> str:
    name = "autoregressive" if threshold is None else f"{threshold}"
    problems, instructed = generated[word_problems.TASK, threshold], generated[instructions.TASK, threshold]
    return (
        f"| {name} | {percentage(problems)} | {problems.tokens_per_step:.2f} | "
        f"{percentage(instructed)} | {instructed.tokens_per_step:.2f} |"
    )
