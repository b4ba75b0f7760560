"""The command line as a user meets it: real processes, real files, exit codes, one-line complaints."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepsaver.cli import MOVED, main
from stepsaver.commands.list import KINDS
from tests.conftest import GOLDEN
from tests.engine.golden_cases import read_golden


def stepsaver(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsaver", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stderr
    return done


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", '{"ids": [5, 6, 7]}', "", '{"ids": [9, 10], "id": "b"}')


def test_a_round_of_speculative_decoding_is_one_entry(prompts: Path) -> None:
    """The prompt's forward is the first round's too, and counts as a prefill."""
    asked = ("--ids", "--json", "--max-new-tokens", 12, "--decode", "speculative:positions=12")
    document = json.loads(stepsaver("generate", "--model", GOLDEN, "--prompts", prompts, *asked).stdout)
    for sample in document["samples"]:
        first, *rounds = sample["forwards"]
        assert first["kind"] == "prefill"
        assert all(entry["kind"] == "verify" and entry["rows"] <= 12 for entry in rounds)
        assert all(0 <= entry["drafted"] <= entry["rows"] for entry in rounds)
        assert first["drafted"] == 0
        assert 2 <= len(sample["forwards"]) <= 12


def test_generate_prints_one_document(prompts: Path) -> None:
    done = stepsaver(
        "generate",
        "--model",
        GOLDEN,
        "--prompts",
        prompts,
        "--ids",
        "--json",
        "--max-new-tokens",
        40,
        "--batch-size",
        2,
    )
    document = json.loads(done.stdout)
    assert [len(sample["ids"]) for sample in document["samples"]] == [40, 40]
    assert all(sample["finish"] == "length" for sample in document["samples"])
    assert document["samples"][0]["forwards"][0] == {"kind": "full", "rows": 32, "first_row": None}
    throughput = document["throughput"]
    assert throughput["tokens_generated"] == 80
    assert throughput["tokens_per_s"] == pytest.approx(80 / throughput["decode_seconds"])
    assert document["engine"]["dtype"] == "float32"
    assert document["cost"]["head_rows"] > 0
    assert done.stderr == ""


def test_generate_equals_the_reference_case(tmp_path: Path) -> None:
    case = read_golden(GOLDEN)["cases"][0]
    file = write_lines(tmp_path / "prompts.jsonl", json.dumps({"ids": case["prompts"][0]}))
    options = ["--threshold", case["threshold"], "--sub-block-size", case["small_block_size"], "--max-new-tokens", "64"]
    options += ["--block-cache" if case["block_cache"] else "--no-block-cache", "--stop-id", case["stop_token"]]
    done = stepsaver("generate", "--model", GOLDEN, "--prompts", file, "--ids", "--json", *map(str, options))
    ids = json.loads(done.stdout)["samples"][0]["ids"]
    assert ids == case["outputs"][0][1 : 1 + len(ids)]


def test_generate_without_json_prints_the_ids(prompts: Path) -> None:
    done = stepsaver("generate", "--model", GOLDEN, "--prompt", "5 6 7", "--ids", "--max-new-tokens", "4")
    assert len(done.stdout.split()) == 4
    assert "tokens/s" in done.stderr


def test_score_prints_one_document(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "requests.jsonl",
        '{"context_ids": [5, 6], "continuation_ids": [7, 8, 9]}',
        '{"context_ids": [5, 6], "continuation_ids": []}',
    )
    done = stepsaver("score", "--model", GOLDEN, "--requests", file, "--ids", "--json", "--rule", "trim")
    document = json.loads(done.stdout)
    assert [score["is_greedy"] for score in document["scores"]] == [False, True]
    assert document["scores"][0]["loglikelihood"] < 0 == document["scores"][1]["loglikelihood"]
    assert document["throughput"]["tokens_scored"] == 3
    assert document["engine"]["rules"] == ["trim:level=changed,budget=4,settle=1,age=4"]


WRONG = [
    (["generate", "--model", "{golden}", "--prompts", "{tmp}/none.jsonl", "--ids"], "cannot read"),
    (["generate", "--model", "{tmp}/none", "--prompts", "{prompts}", "--ids"], "none"),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--threshold", "1.5"],
        "not a number from 0 to 1",
    ),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--sub-block-size", "5"],
        "does not divide",
    ),
    (["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--rule", "trimm"], "nearest: trim"),
    (["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--policy", "factr"], "nearest: factor"),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--rule", "trim", "--no-block-cache"],
        "needs",
    ),
    (["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--dtype", "int8"], "allowed: auto"),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--batch-size", "0"],
        "not a whole number from 1 on",
    ),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--top-p", "0"],
        "not a number above 0 to 1",
    ),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--max-new-tokens", "5000"],
        "line 1: 3 tokens",
    ),
    (["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--mask-id", "512"], "mask id 512"),
    (["generate", "--model", "{golden}", "--prompt", "hello"], "tokenizer"),
    (["generate", "--model", "{golden}"], "--prompt"),
    (["generat"], "generat"),
    (
        ["generate", "--model", "{golden}", "--prompts", "{prompts}", "--ids", "--weights", "flaot16"],
        "nearest: float16",
    ),
    (
        ["generate", "--model", "{golden}", "--prompt", "5 6", "--ids", "--weights", "float16", "--dtype", "float64"],
        "for float32 arithmetic on a CPU",
    ),
    (["score", "--model", "{golden}", "--requests", "{prompts}", "--ids"], "context_ids"),
    (
        ["score", "--model", "{golden}", "--requests", "{prompts}", "--ids", "--estimator", "traject"],
        "nearest: trajectory",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a[-2:]) for a, _ in WRONG])
def test_wrong_use_is_one_line_and_exit_2(
    arguments: list[str], message: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"golden": GOLDEN, "tmp": tmp_path, "prompts": prompts}
    assert main([argument.format(**places) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ('{"ids": [1, 512]}', "line 2: id 512 is outside the vocabulary of 512"),
        ('{"ids": ["a"]}', "line 2: expected"),
        ('{"prompt": "text"}', "line 2: expected"),
        ('{"ids": [true]}', "line 2: expected"),
    ],
)
def test_wrong_lines_are_named(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no weights are read before that is said."""
    monkeypatch.setattr("stepsaver.evaluation.open_model.load_model", None)
    file = write_lines(tmp_path / "prompts.jsonl", '{"ids": [5]}', line)
    assert main(["generate", "--model", str(GOLDEN), "--prompts", str(file), "--ids"]) == 2
    assert message in capsys.readouterr().err


def test_logits_that_are_not_finite_are_an_error_and_never_a_text(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert main(["generate", "--model", str(folder), "--prompts", str(prompts), "--ids"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not finite: sample 0, block at position 0, step 0 (full)" in captured.err


@pytest.mark.parametrize("kind", KINDS)
def test_lists_fit_a_terminal_and_have_documents(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document) > 2
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [re.split(r"\W", line)[0] for line in lines if not line.startswith(" ")]
    assert heads == list(document)
    assert main(["list", kind, "--wide"]) == 0
    wide = capsys.readouterr().out.splitlines()
    assert [re.split(r"\W", line)[0] for line in wide if not line.startswith(" ")] == heads


def test_a_list_says_which_fields_have_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policies"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert {"threshold(threshold=0.9, at_most=none, strict=true)", "quota(steps=none, threshold=none)"} <= set(heads)


def test_help_is_quick_and_names_every_command() -> None:
    done = stepsaver("--help")
    for command in ("demo", "doctor", "generate", "list", "new", "report", "run", "score", "status", "tune"):
        assert command in done.stdout


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_old_name_says_what_has_its_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--anything"]) == 2
    assert capsys.readouterr().err == f"stepsaver: there is no command {name} any more: {MOVED[name]}\n"
