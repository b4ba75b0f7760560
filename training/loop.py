"""The training loop: seeded, resumable at any save, one line of log per step."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from training.batches import make_batch
from training.network import initial_model, losses
from training.problems.tokenizer import END_ID, MASK_ID, build_tokenizer
from training.recipe import Recipe

STATE_FILE = "state.pt"
LOG_FILE = "log.jsonl"
Watcher = Callable[[dict[str, Any]], None]

# What may differ between a saved run and the run that continues it, as long as the steps done stay the same.
LENGTHS = {"autoregressive_steps", "joint_steps", "rates", "decay_start", "decay_steps", "finish_steps"}
CONVENIENCES = {"save_every", "check_every", "threads"}


@dataclass
class Run:
    """A training under way: everything that a save keeps."""

    recipe: Recipe
    model: Transformer
    optimizer: torch.optim.AdamW
    step: int = 0
    seconds: float = 0.0


def train(
    out: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    until: int | None = None,
    compiled: bool = True,
    watch: Watcher = lambda line: None,
) -> Run:
    """Trains to the end of the recipe, or `until` a step, and saves to `out`. `watch` sees every line of the log."""
    torch.set_num_threads(recipe.threads)
    tokenizer = build_tokenizer()
    run = resumed_run(out, recipe, tokenizer) if resume else new_run(out, recipe, tokenizer)
    end = recipe.steps if until is None else min(until, recipe.steps)
    with (out / LOG_FILE).open("a", encoding="utf-8") as log:
        while run.step < end:
            line = train_step(run, tokenizer, compiled=compiled)
            if run.step % recipe.check_every == 0 or run.step == end:
                line["held_out"] = held_out_losses(run, tokenizer)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if run.step % recipe.save_every == 0 or run.step == end:
                save_run(run, out)
            watch(line)
    return run


def train_step(run: Run, tokenizer: Tokenizer, *, compiled: bool) -> dict[str, Any]:
    started = time.perf_counter()
    recipe = run.recipe
    rate = recipe.rate(run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    stage = recipe.stage(run.step)
    found = losses(run.model, make_batch(recipe, tokenizer, step=run.step, stage=stage), compiled=compiled)
    loss = found.autoregressive + found.diffusion  # the latter is zero without noisy units
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip_norm)
    run.optimizer.step()
    run.step += 1
    run.seconds += time.perf_counter() - started
    return {
        "step": run.step,
        "stage": stage,
        "autoregressive": round(found.autoregressive.item(), 5),
        "diffusion": round(found.diffusion.item(), 5),
        "gradient": round(norm.item(), 4),
        "rate": round(rate, 8),
        "seconds": round(run.seconds, 2),
    }


@torch.no_grad()
def held_out_losses(run: Run, tokenizer: Tokenizer) -> dict[str, float]:
    """Both losses on one fixed batch of the test split, as hard as the test, whatever the stage."""
    batch = make_batch(run.recipe, tokenizer, step=run.recipe.steps - 1, stage="joint", split="test")
    found = losses(run.model, batch)
    return {name: round(value.item(), 5) for name, value in found._asdict().items()}


def new_run(out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Run:
    if (out / STATE_FILE).exists():
        raise UsageError(f"{out} holds a training already; resume it or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG_FILE).write_text("", encoding="utf-8")
    config = recipe.model_config(vocab=tokenizer.get_vocab_size(), mask_id=MASK_ID, stop_id=END_ID)
    model = initial_model(config, seed=recipe.seed, deviation=recipe.initial_deviation)
    return Run(recipe, model, new_optimizer(model, recipe))


def new_optimizer(model: Transformer, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rates[0][1], betas=recipe.betas, fused=True)


def save_run(run: Run, out: Path) -> None:
    """Writes the state to a file beside it, then renames that, so that a stop at any moment leaves a whole state."""
    state = {
        "recipe": asdict(run.recipe),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "step": run.step,
        "seconds": run.seconds,
    }
    beside = out / (STATE_FILE + ".writing")
    torch.save(state, beside)
    beside.replace(out / STATE_FILE)


def resumed_run(out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Run:
    """Returns the saved run. Its log is cut after the saved step, so that no step is in it twice."""
    path = out / STATE_FILE
    if not path.exists():
        raise UsageError(f"no training to resume in {out}")
    config = recipe.model_config(vocab=tokenizer.get_vocab_size(), mask_id=MASK_ID, stop_id=END_ID)
    try:
        state = torch.load(path, weights_only=True)
        _check_continues(state, recipe, out)
        model = Transformer(config)
        model.load_state_dict(state["model"])
        optimizer = new_optimizer(model, recipe)
        optimizer.load_state_dict(state["optimizer"])
        lines = read_log(out)[: state["step"]]
    except UsageError:
        raise
    except Exception as error:  # reading a damaged file can raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"the training in {out} is damaged and cannot go on: {reason}") from None
    (out / LOG_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Run(recipe, model, optimizer, state["step"], state["seconds"])


def _check_continues(state: dict[str, Any], recipe: Recipe, out: Path) -> None:
    """Refuses a recipe under which the saved steps would have been different."""
    saved = Recipe(**state["recipe"])
    changed = {name for name, value in asdict(recipe).items() if asdict(saved)[name] != value}
    done = range(state["step"])
    same_steps = all((saved.stage(step), saved.rate(step)) == (recipe.stage(step), recipe.rate(step)) for step in done)
    forbidden = changed - CONVENIENCES - (LENGTHS if same_steps else set())
    if forbidden:
        raise UsageError(f"the training in {out} cannot go on with another {', '.join(sorted(forbidden))}")


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG_FILE).read_text(encoding="utf-8").splitlines()]
