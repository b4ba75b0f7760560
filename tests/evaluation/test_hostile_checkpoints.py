"""Checkpoints by strangers: no code of theirs runs, and what cannot be used is one line, soon and in little memory."""

import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import stepsaver
from tests.evaluation.tiny_folder import write_model_folder

Change = Callable[[Path], Any]
PROMPT = "a" * 40 + "!"
RAN = "touched by code of the checkpoint"


class Touch:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{RAN}'",)


def _own_file(folder: Path, name: str) -> Path:
    """A small file of the folder: no change follows a link out of it, or reads what another change made endless."""
    path = folder / name
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
        raise ValueError(f"{name} is spoiled already")
    return path


def _pickle(name: str) -> Change:
    def change(folder: Path) -> None:
        for each in ("model.safetensors", name):
            (folder / each).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Touch()))

    return change


def _json(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = _own_file(folder, name)
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _code(folder: Path) -> None:
    for name in ("evil.py", "__init__.py", "modeling_evil.py"):
        (folder / name).write_text(f"open({RAN!r}, 'w')\n")
    _json("config.json", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"})(folder)
    _json("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, tokenizer_class="evil.T")(folder)


def _text(name: str, content: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return change


def _link(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return change


def _pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _huge(name: str) -> Change:
    """A file of 5 GB without content, as a billion merges would have."""

    def change(folder: Path) -> None:
        if name == "merges.txt":
            (folder / "tokenizer.json").unlink(missing_ok=True)
            (folder / "vocab.json").write_text("{}")
            token = {"content": "|<MASK>|"}
            _json("tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder={"0": token})(folder)
        (folder / name).unlink(missing_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(5 << 30)

    return change


def _tokenizer(**parts: Any) -> Change:
    return _json("tokenizer.json", **parts)


def _split(expression: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    spelled = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, spelled]})


def _replaced(content: str, pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLED = _replaced("aa", {"String": "a"})
REPEATED = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 999, "pair": []}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILES = ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "tokenizer_config.json")
WORKS = "it works"
CASES: dict[str, tuple[Change, str]] = {
    "pickle": (_pickle("pytorch_model.bin"), "has no *.safetensors file"),
    "pickle by another name": (_pickle("model.safetensors"), "is damaged or cut short"),
    "code": (_code, WORKS),
    **{f"endless {name}": (_link(name, "/dev/zero"), "is not a file") for name in FILES},
    **{f"pipe {name}": (_pipe(name), "is not a file") for name in (*FILES, "added_tokens.json")},
    "outside config": (_link("config.json", "/etc/passwd"), "is not JSON"),
    "outside weights": (_link("model.safetensors", "/etc/passwd"), "is damaged or cut short"),
    "outside tokenizer": (_link("tokenizer.json", "/etc/passwd"), "is not JSON"),
    "a circle": (_link("model.safetensors", "model.safetensors"), "has no model.safetensors"),
    "huge tokenizer": (_huge("tokenizer.json"), "has 5368709120 bytes, more than 268435456"),
    "huge merges": (_huge("merges.txt"), "has 5368709120 bytes, more than 268435456"),
    "deep": (_text("tokenizer.json", "[" * 100000), "is not JSON"),
    "an expression that explodes": (_split("(a+)+$"), "retry-limit-in-match over"),
    "an expression that is too deep": (_split("(" * 5000 + "a" + ")" * 5000), "parse depth limit over"),
    "a normalizer that explodes": (_tokenizer(normalizer=_replaced("", {"Regex": "(a+)+$"})), "retry-limit-in-match"),
    "a million for one": (_tokenizer(normalizer=_replaced("a" * 10**6, {"String": "a"})), "more than 64 times as long"),
    "doubled": (_tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 60}), "more than 64 times"),
    "prepended": (_tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "more than 64 times as long"),
    "repeated": (_tokenizer(post_processor=REPEATED | {"special_tokens": {}}), "more than 64 times as long"),
    "a template that loops": (_text("chat_template.jinja", LOOPS), "its loops and texts exceed 67108864 characters"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("sound"))


def _outcome(folder: Path) -> str:
    try:
        stepsaver.load(folder).generate(PROMPT, max_new_tokens=4, ids=True)
    except stepsaver.UsageError as error:
        return str(error)
    return WORKS


def _seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint(case: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = CASES[case]
    folder = Path(copytree(sound, tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    change(folder)
    said = _outcome(folder)
    assert expected in said
    assert "\n" not in said
    assert not (tmp_path / RAN).exists()


@pytest.mark.long
def test_several_at_once(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 checkpoints with two or three of the changes: one line or an answer, within seconds, and no code is run."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    for number in range(400):
        folder = Path(copytree(sound, tmp_path / f"model_{number}"))
        chosen = draw.sample(list(CASES), draw.choice([2, 3]))
        for case in chosen:
            try:
                CASES[case][0](folder)
            except (OSError, ValueError, RecursionError):
                break  # a change of a file that is spoiled already
        started = _seconds()
        said = _outcome(folder)
        assert "\n" not in said, chosen
        assert _seconds() - started < 60, chosen
        assert not (tmp_path / RAN).exists(), chosen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20
