"""Cases from what there is: the command line's own parser, prompts, documents, trainings; by kind with all others."""

import argparse
import json
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from hypothesis import strategies as st

from stepsaver import commands
from stepsaver.cli import build_parser
from tests.fuzz.checkpoints import checkpoint_cases
from tests.fuzz.damage import as_json, spoiled
from tests.fuzz.entries import entry_cases
from tests.fuzz.experiments import experiment_cases, stored_cases
from tests.fuzz.files import damaged
from tests.fuzz.words import WORDS, words
from tests.fuzz.workspace import DOCUMENTS, GENERATE, RUN, SCORE, TRAIN, WITH_MODEL, Case, affordable
from training.__main__ import main as train
from training.__main__ import training_parser

LEFT_OUT = ("help", "export")  # one ends all, the other measures a checkpoint for minutes
# What commands can do here; others are called without a word. What takes minutes is given a size that it refuses.
CALLS: dict[str, list[list[str]]] = {
    "generate": [GENERATE, WITH_MODEL[2], ["generate", "--model", "model", "--ids", "--prompts", "ids.jsonl"]],
    "score": [SCORE],
    "list": [["list", "rules"], ["list", "models"]],
    "run": [[*RUN, "--dry-run"], RUN],
    "status": [["status"], ["status", "tiny", "--limit", "2"]],
    "report": [["report", "tiny", "--limit", "2"], ["report", "tiny", "--limit", "2", "--check"], ["report"]],
    "new": [["new", "x"]],
}
NAMES = sorted(each.name for each in iter_modules(commands.__path__) if not each.name.startswith("_"))
COMMANDS = {name: CALLS.get(name, [[name]]) for name in NAMES}


def _options(command: str) -> list[argparse.Action]:
    parser = build_parser(command)
    chosen = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return [each for each in chosen.choices[command]._actions if each.option_strings and each.dest not in LEFT_OUT]


TRAINING_OPTIONS = [each for each in training_parser()._actions if each.dest not in LEFT_OUT and each.nargs != 0]
OPTIONS = {command: _options(command) for command in COMMANDS}


@st.composite
def option_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """A call with one to three options more, or with other values."""
    command = draw(st.sampled_from(NAMES))
    arguments = list(draw(st.sampled_from(COMMANDS[command])))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 9))
        if kind == 0 and len(arguments) > 1:
            arguments.pop(draw(st.integers(1, len(arguments) - 1)))
        elif kind == 1 and len(arguments) > 1:
            arguments[draw(st.integers(1, len(arguments) - 1))] = draw(words)
        elif kind == 2:
            arguments.append(draw(words))
        elif options := OPTIONS[command]:
            option = draw(st.sampled_from(options))
            arguments.append(option.option_strings[0])
            if option.nargs != 0:
                arguments.append(draw(st.sampled_from(sorted(option.choices)) | words if option.choices else words))
    return Case(affordable(arguments))


@st.composite
def line_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """Prompts and requests that are not what they should be."""
    name, command = draw(
        st.sampled_from(
            [
                ("prompts.jsonl", ["generate", "--model", "model", "--prompts", "prompts.jsonl"]),
                ("ids.jsonl", ["generate", "--model", "model", "--ids", "--prompts", "ids.jsonl", "--json"]),
                ("requests.jsonl", SCORE),
            ]
        )
    )
    lines = (workspace / name).read_bytes().splitlines()
    if draw(st.booleans()):
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = as_json(draw(spoiled(json.loads(lines[index]))))
        new: Any = b"\n".join(lines)
    else:
        new = draw(damaged(b"\n".join(lines)))
    limit = ["--max-new-tokens", "4"] if command[0] == "generate" else []
    return Case([*command, *limit], {name: new})


@st.composite
def document_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """A task's documents in local files."""
    split = draw(st.sampled_from(["train", "test"]))
    rows = draw(spoiled(DOCUMENTS)) if draw(st.booleans()) else DOCUMENTS
    lines = b"\n".join(map(as_json, rows)) if isinstance(rows, list) else as_json(rows)
    suffix = draw(st.sampled_from(["jsonl", "json", "csv", "parquet", "jsonl.gz"]))
    files: dict[str, Any] = {f"data/gsm8k_{split}.jsonl": None}
    files[f"data/gsm8k_{split}.{suffix}"] = draw(damaged(lines) | st.just(lines))
    task = draw(st.sampled_from(["gsm8k", "gsm8k", "gsm8k", "mmlu", "x", "gsm8k_cot", "humaneval", ""]))
    dry = ["run", "tiny", "--limit", "1", "--task", task, "--data-dir", "data", "--dry-run"]
    return Case(dry, files)


@st.composite
def training_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """Recipes that cannot be, and states that are not one."""
    arguments = list(TRAIN)
    files: dict[str, Any] = {}
    if draw(st.booleans()):
        arguments.append("--resume")
        name = draw(st.sampled_from(["state.pt", "log.jsonl"]))
        files[f"training/{name}"] = draw(damaged((workspace / "training" / name).read_bytes()))
    else:
        files["training"] = None
    for _ in range(draw(st.integers(0, 2))):
        option = draw(st.sampled_from(TRAINING_OPTIONS))
        arguments += [option.option_strings[0], draw(st.sampled_from(WORDS) | st.integers(-9, 9).map(str))]
    return Case(arguments, files, train)


FAMILIES = {
    "checkpoint": checkpoint_cases,
    "options": option_cases,
    "experiment": experiment_cases,
    "stored": stored_cases,
    "lines": line_cases,
    "documents": document_cases,
    "training": training_cases,
    "entries": entry_cases,
}
