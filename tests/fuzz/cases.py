"""Cases from what there is: the fields of the schemas, the command line's own parser, the files of a workspace."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from stepsaver.bench.spec import ExperimentSpec
from stepsaver.cli import build_parser
from tests.fuzz.damage import as_json, damaged_bytes, spoiled
from tests.fuzz.workspace import CELLS, DOCUMENTS, FOLDER, RUN, TRAIN, Case

GENERATE = ["generate", "--model", "model", "--max-new-tokens", "4", "--prompt", "ab"]
SCORE = ["score", "--model", "model", "--requests", "requests.jsonl"]
CALIBRATE = ["calibrate", "--model", "model", "--max-new-tokens", "12", "--prompt", "ab", "--threshold", "1"]
WITH_MODEL = [
    GENERATE,
    [*GENERATE, "--no-chat"],
    ["generate", "--model", "model", "--max-new-tokens", "4", "--ids", "--prompt", "5 6 7", "--json"],
    SCORE,
    CALIBRATE,
]
TEMPLATES = [
    "{{ 1/0 }}", "{{ 'a' * 10**9 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ messages[5].x.y }}", "{{",
    "{% x %}", "{{ raise_exception('no') }}", "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ ''.__class__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | tojson }}",
    "{{ 10 ** (10 ** 8) }}", "\x00", "",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "{{ strftime_now(1) }}",
    "{{ '%999999999d' % 1 }}", "{{ 'a'.center(10**10) }}", "{{ [0] * 10**9 }}", "{{ messages[0]['content'] }}",
]  # fmt: skip
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)
# What stands in files that the workspace's model does without.
OTHERWISE = {
    "generation_config.json": {"eos_token_id": 1, "bos_token_id": [1]},
    "added_tokens.json": {"|<MASK>|": 0},
    "special_tokens_map.json": {"eos_token": "<|end|>", "mask_token": {"content": "|<MASK>|"}},
    "model.safetensors.index.json": {"weight_map": {"model.norm.weight": "model.safetensors"}},
}
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
WORDS = [
    "", " ", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e309", "0.5", "99999999999999999999", "9" * 5000, "10000000",
    "x", "../x", "/proc", "/proc/x/y", "/dev/full", "/dev/null", "missing/x", "a" * 300, "\udcff", "é\u202e", "\x1b[2J",
    "[", "{0}", "meta", "xpu", "mps", "cuda:99", "cpu:-1", "slurm", "none", "model", "data", "experiments/tiny", "a/b",
    "prompts.jsonl", "ids.jsonl", "requests.jsonl", "tiny", "baseline", "previous", "mini_ifeval", "gsm8k", "float16",
    "trim:level=drift", "trim:budget=nan", "layer_reuse:k=2,layers=0", "layer_reuse:k=9,layers=0-99999999999",
    "adaptive_layers:probe=1,threshold=nan", "threshold:threshold=nan", "forced:k=99999999999", "quota:steps=1",
    "factor:factor=inf", "0:1", "0:nan", "1:1", "--", "-",
]  # fmt: skip
LEFT_OUT = ("help", "export")  # one ends all, the other measures a checkpoint for minutes
# Every command with something that it can do. What takes minutes is given a size that it refuses.
COMMANDS: dict[str, list[list[str]]] = {
    "generate": [GENERATE, WITH_MODEL[2], ["generate", "--model", "model", "--ids", "--prompts", "ids.jsonl"]],
    "score": [SCORE],
    "calibrate": [CALIBRATE],
    "run": [[*RUN, "--dry-run"], RUN],
    "status": [["status"], ["status", "tiny", "--limit", "2"]],
    "verdict": [["verdict", "tiny", "--limit", "2"]],
    "audit": [["audit", "tiny", "--limit", "2"]],
    "report": [["report", "tiny", "--limit", "2"], ["report"]],
    "discard": [["discard", "tiny", "--limit", "2", "--why", "so"]],
    "new": [["new", "x"]],
    "train": [TRAIN],
    "speed": [["speed", "--shape", "x"]],
    "demo": [["demo"]],
    "doctor": [["doctor"]],
    "models": [["models"]],
    "policies": [["policies"]],
    "rules": [["rules"]],
    "tasks": [["tasks"]],
}


def _options(command: str) -> list[argparse.Action]:
    parser = build_parser(command)
    chosen = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return [each for each in chosen.choices[command]._actions if each.option_strings and each.dest not in LEFT_OUT]


OPTIONS = {command: _options(command) for command in COMMANDS}


@st.composite
def option_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """A call with one to three options more, or with other values."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    arguments = list(draw(st.sampled_from(COMMANDS[command])))
    words = st.sampled_from(WORDS) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=6).map(_plain)
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
                arguments.append(draw(words))
    return Case(_affordable(arguments))


def _affordable(arguments: list[str]) -> list[str]:
    """A run of more problems than a few is right, and takes longer than a case may."""
    if arguments[0] == "run":
        for index, text in enumerate(arguments[:-1]):
            given = arguments[index + 1]
            if text == "--limit" and given.isdecimal() and int(given) > 4:
                arguments[index + 1] = "4"
    return arguments


def _plain(text: str) -> str:
    """No call can pass a zero byte."""
    return text.replace("\x00", "0").encode("utf-8", "surrogateescape" if text.isascii() else "ignore").decode()


@st.composite
def checkpoint_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """A model one of whose files is spoiled."""
    name = draw(st.sampled_from([*CHECKPOINT_FILES, *["config.json"] * 6]))
    path = workspace / "model" / name
    content = path.read_bytes() if path.exists() else as_json(OTHERWISE[name])
    if name == "chat_template.jinja":
        new: Any = draw(st.sampled_from(TEMPLATES)).encode() if draw(st.booleans()) else draw(_damaged(content))
    elif name == "model.safetensors":
        new = draw(_damaged(content) | st.just(b"") if draw(st.booleans()) else _weights(path))
    else:
        new = draw(_document(content, _config_fields() if name == "config.json" else {}))
    return Case(list(draw(st.sampled_from(WITH_MODEL))), {f"model/{name}": new})


def _config_fields() -> dict[str, Any]:
    """Every field that is read of a configuration, with a value that may stand there."""
    from stepsaver.engine.models.config import FIELDS

    return dict.fromkeys(FIELDS, 1) | {"rope_scaling": ROPE, "rope_parameters": ROPE}


@st.composite
def _document(draw: st.DrawFn, content: bytes, fields: dict[str, Any] | None = None) -> Any:
    """A JSON document: its values spoiled, or its bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(_damaged(content))
    tree = json.loads(content)
    if fields and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(fields)))
        tree[name] = fields[name]
        return as_json(draw(spoiled(tree, (name,))))
    return as_json(draw(spoiled(tree)))


def _damaged(content: bytes) -> st.SearchStrategy[Any]:
    return damaged_bytes(content) | damaged_bytes(content) | st.sampled_from([None, FOLDER])


@st.composite
def _weights(draw: st.DrawFn, path: Path) -> bytes:
    """Tensors of other types, shapes and values."""
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)))
    change: Callable[[torch.Tensor], torch.Tensor] = draw(
        st.sampled_from(
            [
                lambda t: t.to(torch.int64),
                lambda t: t.bool(),
                lambda t: t.to(torch.float8_e4m3fn),
                lambda t: t.half(),
                lambda t: t.double(),
                lambda t: t[:1].clone(),
                lambda t: t.flatten(),
                lambda t: t[:0],
                lambda t: t * torch.nan,
                lambda t: t * torch.inf,
                lambda t: t * 0,
                lambda t: torch.tensor(1.0),
            ]
        )
    )
    tensors[name] = change(tensors[name]).contiguous()
    return save(tensors)


@st.composite
def experiment_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """An `experiment.yaml` that is not as it should be."""
    name = "experiments/tiny/experiment.yaml"
    content = (workspace / name).read_bytes()
    kind = draw(st.integers(0, 5))
    if kind == 0:
        new: Any = draw(_damaged(content))
    elif kind == 1:
        new = content + b"\nmodel: model\n" if draw(st.booleans()) else b"&a [*a]\n" + content
    else:
        tree = yaml.safe_load(content)
        if kind == 2:
            axes = {f"k{n}": list(range(draw(st.integers(0, 10)))) for n in range(draw(st.integers(0, 10)))}
            pattern = draw(st.sampled_from(["{k0}", "{0}", "{k0[0]}", "{k0.x}", "n{k0}{k1}", "{", "{k0!r:>999999999}"]))
            tree["configs"] = {"grid": axes, "name": pattern, "rules": [draw(st.sampled_from(["trim", pattern]))]}
        tree = draw(spoiled(tree, tuple(ExperimentSpec.model_fields)))
        new = draw(st.sampled_from([as_json, _as_yaml]))(tree)
    command = draw(st.sampled_from([["status"], ["verdict", "tiny", "--limit", "2"], [*RUN, "--dry-run"], ["report"]]))
    return Case(list(command), {name: new})


def _as_yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree, allow_unicode=False).encode("utf-8", "backslashreplace")


@st.composite
def stored_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """Results, jobs or the lock in a state that no run leaves them in."""
    cell = CELLS / draw(st.sampled_from(["baseline", "other"]))
    names = [cell / name for name in ("summary.json", "run.json", "samples.jsonl", "trace.jsonl")]
    names += [Path("experiments/tiny/logs/jobs.jsonl"), CELLS.parent / ".lock", cell, CELLS]
    names += [Path("experiments/tiny/results.md")]
    path = draw(st.sampled_from(names))
    content = (workspace / path).read_bytes() if (workspace / path).is_file() else b"x"
    new: Any
    if path.suffix == ".json":
        new = draw(_document(content))
    elif path.suffix == ".jsonl" and draw(st.booleans()):
        lines = content.splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = as_json(draw(spoiled(json.loads(lines[place]))))
        new = b"\n".join(lines) + b"\n"
    else:
        new = draw(_damaged(content))
    commands = [
        ["status"], ["audit", "tiny", "--limit", "2"], ["verdict", "tiny", "--limit", "2", "--json"],
        ["report", "tiny", "--limit", "2"], ["report"], [*RUN, "--dry-run"], RUN,
        ["report", "tiny", "--limit", "2", "--save-artifacts", "--csv", "x.csv"],
        ["discard", "tiny", "--limit", "2", "--why", "so"],
    ]  # fmt: skip
    return Case(list(draw(st.sampled_from(commands))), {str(path): new})


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
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = as_json(draw(spoiled(json.loads(lines[place]))))
        new: Any = b"\n".join(lines)
    else:
        new = draw(_damaged(b"\n".join(lines)))
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
    files[f"data/gsm8k_{split}.{suffix}"] = draw(_damaged(lines) | st.just(lines))
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
        files[f"training/{name}"] = draw(_damaged((workspace / "training" / name).read_bytes()))
    else:
        files["training"] = None
    for _ in range(draw(st.integers(0, 2))):
        option = draw(st.sampled_from([each for each in OPTIONS["train"] if each.nargs != 0]))
        arguments += [option.option_strings[0], draw(st.sampled_from(WORDS) | st.integers(-9, 9).map(str))]
    return Case(arguments, files)


FAMILIES = {
    "checkpoint": checkpoint_cases,
    "options": option_cases,
    "experiment": experiment_cases,
    "stored": stored_cases,
    "lines": line_cases,
    "documents": document_cases,
    "training": training_cases,
}
