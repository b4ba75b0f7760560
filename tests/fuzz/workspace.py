"""A small folder with one of everything that the commands read: a model, prompts, documents, results, a training."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from stepsaver.cli import main
from tests.evaluation.tiny_folder import write_model_folder
from tests.fuzz.command_process import CODE, OUTPUTS, Call, Command, Outcome, run_calls
from training.__main__ import main as train

EXPERIMENT = """\
question: Does it hold?
tasks: [mini_ifeval]
configs:
  - name: baseline
  - {name: other, rules: ["layer_reuse:k=3,layers=0,mode=output"]}
baseline: baseline
model: model
batch_size: 2
chunk_samples: 2
decoding: {sub_block_size: 4, max_new_tokens: 8}
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""
RUN = ["run", "tiny", "--limit", "2"]
CELLS = Path("experiments/tiny/results/mini_ifeval_limit_2")
DOCUMENTS = [
    {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(6)
]  # of GSM8K's form
JOB = {"job": "1", "shards": 1, "results": "x", "tasks": ["mini_ifeval"], "limit": 2}
TRAIN = [
    "--out", "training", "--layers", "2", "--hidden", "16", "--heads", "2", "--mlp", "16",
    "--autoregressive-steps", "1", "--joint-steps", "1", "--autoregressive-units", "12", "--joint-units", "24",
    "--threads", "1", "--no-compile", "--until", "1",
]  # fmt: skip
GENERATE = ["generate", "--model", "model", "--max-new-tokens", "4", "--prompt", "ab"]
SCORE = ["score", "--model", "model", "--requests", "requests.jsonl"]
WITH_MODEL = [
    GENERATE,
    [*GENERATE, "--no-chat"],
    ["generate", "--model", "model", "--max-new-tokens", "4", "--ids", "--prompt", "5 6 7", "--json"],
    SCORE,
]

FOLDER = "a folder"  # in place of a file
MEMORY = Path("/dev/shm")  # removing two dozen thousand folders takes a minute and a half on some disks
Spoiled = dict[str, bytes | str | None]  # by path: new content, FOLDER, or None for nothing


@dataclass(frozen=True)
class Case:
    """Arguments of a call, what it finds in its folder instead of what belongs there, and what is called."""

    arguments: list[str]
    files: Spoiled = field(default_factory=dict)
    command: Command = main


def write_workspace(folder: Path) -> Path:
    write_model_folder(folder / "model")
    experiment = folder / "experiments" / "tiny"
    experiment.mkdir(parents=True)
    (experiment / "experiment.yaml").write_text(EXPERIMENT, encoding="utf-8")
    (experiment / "logs").mkdir()
    _write_lines(experiment / "logs" / "jobs.jsonl", [JOB])
    _write_lines(folder / "prompts.jsonl", [{"prompt": "Say a word."}, {"prompt": "b", "id": "2"}])
    (folder / "recipe.yaml").write_text("policy: threshold\nrules: [trim]\nbatch_size: 2\n", encoding="utf-8")
    _write_lines(folder / "ids.jsonl", [{"ids": [5, 6, 7]}, {"ids": [9]}])
    _write_lines(folder / "requests.jsonl", [{"context": "a b", "continuation": " c"}])
    (folder / "data").mkdir()
    for split in ("train", "test"):
        _write_lines(folder / "data" / f"gsm8k_{split}.jsonl", DOCUMENTS)
    for arguments, command in ((RUN, main), (TRAIN, train)):
        [done] = run_calls([Call(arguments, folder, command)])
        assert done.code in (0, 1), done
    for name in (*OUTPUTS, CODE):
        (folder / name).unlink()
    return folder


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def affordable(arguments: list[str]) -> list[str]:
    """A run of more problems than a few is right, and takes longer than a case may."""
    if arguments[0] == "run":
        arguments += [] if "--limit" in arguments else ["--limit", "2"]
        for index, text in enumerate(arguments[:-1]):
            given = arguments[index + 1]
            if text == "--limit" and given.isdecimal() and int(given) > 4:
                arguments[index + 1] = "4"
    return arguments


def run_cases(cases: list[Case], workspace: Path) -> list[Outcome]:
    """Runs each case in a copy of the workspace. After one that ends the process no other is run."""
    with TemporaryDirectory(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as parent:
        folders = [Path(parent) / str(number) / "here" for number in range(len(cases))]
        for case, folder in zip(cases, folders, strict=True):
            shutil.copytree(workspace, folder)
            _spoil(folder, case.files)
        return run_calls(
            [Call(case.arguments, folder, case.command) for case, folder in zip(cases, folders, strict=True)]
        )


def _spoil(folder: Path, files: Spoiled) -> None:
    for name, content in files.items():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if content is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir()
