"""Rules, policies, architectures and tasks of other packages: found and used, or refused in one line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import stepsaver
from stepsaver.cli import main
from stepsaver.engine import plugins, registry
from stepsaver.engine.models.architecture import architecture_named
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.evaluation.task_registry import find_declaration, unknown_task
from tests.evaluation.tiny_folder import write_model_folder
from tests.extending.fake_package import write_package

MODULE = """
from dataclasses import dataclass, field
from typing import ClassVar
from stepsaver.extending import Architecture, Rule, TaskDeclaration


@dataclass(frozen=True)
class Nothing(Rule):
    name: ClassVar[str] = "nothing_left_out"
    purpose: ClassVar[str] = "to be found"
    times: int = 1

    def narrow(self, plan, view):
        return plan


@dataclass(frozen=True)
class FirstRow:
    name: ClassVar[str] = "first_row"

    def choose(self, candidates, view):
        return 1 << candidates.positions[0]


MINE = Architecture("MineForCausalLM", attention_bias=None, output_bias=False, mask_id=None, block_size=4)
TASK = TaskDeclaration("my_task", source="somewhere/tasks", path="generation", accuracy="exact_match,none")
"""
GROUPS = {
    "stepsaver.rules": {"nothing_left_out": "mine:Nothing"},
    "stepsaver.policies": {"first_row": "mine:FirstRow"},
    "stepsaver.architectures": {"MineForCausalLM": "mine:MINE"},
    "stepsaver.tasks": {"my_task": "mine:TASK"},
}


class Install(Protocol):
    def __call__(self, entries: dict[str, dict[str, str]], module: str = MODULE, name: str = "mine") -> Path: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def install(entries: dict[str, dict[str, str]], module: str = MODULE, name: str = "mine") -> Path:
        monkeypatch.syspath_prepend(str(write_package(tmp_path, name, module, entries)))
        plugins._entries.cache_clear()
        return tmp_path

    yield install
    plugins._entries.cache_clear()
    for name in ("mine", "other"):
        sys.modules.pop(name, None)


def test_all_four_kinds_are_found(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(GROUPS)
    rule = parse_rule("nothing_left_out:times=3")
    assert registry.describe(rule) == "nothing_left_out:times=3"
    assert parse_policy("first_row").name == "first_row"
    assert architecture_named("MineForCausalLM").block_size == 4
    found = find_declaration("my_task")
    assert found is not None
    assert found.source == "somewhere/tasks"
    for command, name in (("policies", "first_row"), ("models", "MineForCausalLM"), ("tasks", "my_task")):
        assert main(["list", command]) == 0
        assert name in capsys.readouterr().out
    assert main(["list", "rules"]) == 0
    assert "nothing_left_out(times=1)\n    to be found" in capsys.readouterr().out


def test_a_wrong_name_is_answered_with_plugins_too(install: Install) -> None:
    install(GROUPS)
    with pytest.raises(stepsaver.UsageError, match="nearest: nothing_left_out"):
        parse_rule("nothing_left")
    with pytest.raises(stepsaver.UsageError, match=r"nearest: .*MineForCausalLM"):
        architecture_named("MeinForCausalLM")
    assert "my_task" in str(unknown_task("my_tusk"))


def test_they_decode(install: Install, tmp_path: Path) -> None:
    model = stepsaver.load(write_model_folder(tmp_path / "model"), dtype="float64")
    plain = model.generate(["abc"], max_new_tokens=20, ids=True)
    install(GROUPS)
    assert model.generate(["abc"], rules=["nothing_left_out"], max_new_tokens=20, ids=True) == plain
    one_by_one = list(model.stream(["abc"], policy="first_row", max_new_tokens=20))
    lengths = [len(piece.ids) for piece in one_by_one if piece.ids]
    assert len(lengths) > 1
    assert set(lengths) == {1}


@pytest.mark.parametrize(
    ("module", "entries", "use", "message"),
    [
        (
            "1 / 0",
            {"mine_too": "mine:X"},
            "mine_too",
            r"mine_too of mine \(mine:X\) cannot be loaded: ZeroDivisionError",
        ),
        ("import no_such_module", {"x": "mine:X"}, "x", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", {"x": "mine:Missing"}, "x", "cannot be loaded: AttributeError"),
        ("raise RuntimeError('two\\nlines')", {"x": "mine:X"}, "x", "RuntimeError: two lines"),
        ("X = 3", {"x": "mine:X"}, "x", r"x of mine \(mine:X\) is not a frozen dataclass with the name 'x'"),
        (MODULE, {"another": "mine:Nothing"}, "another", "is not a frozen dataclass with the name 'another'"),
        (MODULE, {"first_row": "mine:FirstRow"}, "first_row", "is not a Rule"),
        (MODULE, {"trim": "mine:Nothing"}, "trim", r"trim is declared by stepsaver and by mine \(mine:Nothing\)"),
    ],
)
def test_a_plugin_that_is_wrong_is_one_line(
    install: Install, module: str, entries: dict[str, str], use: str, message: str
) -> None:
    install({"stepsaver.rules": entries}, module)
    with pytest.raises(stepsaver.UsageError, match=message) as raised:
        parse_rule(use)
    assert "\n" not in str(raised.value)
    assert main(["list", "rules"]) == 2
    if use != "trim":
        parse_rule("trim")  # it harms nobody who does not use it


def test_two_packages_may_not_have_one_name(install: Install) -> None:
    install(GROUPS)
    install({"stepsaver.rules": {"nothing_left_out": "other:Nothing"}}, name="other")
    with pytest.raises(stepsaver.UsageError, match=r"declared by .*mine.* and by .*one of them has to go"):
        parse_rule("nothing_left_out")


def test_a_class_that_is_not_frozen_has_no_identity(install: Install) -> None:
    thawed = MODULE.replace("@dataclass(frozen=True)\nclass FirstRow", "@dataclass\nclass FirstRow")
    install({"stepsaver.policies": {"first_row": "mine:FirstRow"}}, thawed)
    with pytest.raises(stepsaver.UsageError, match="is not a frozen dataclass"):
        parse_policy("first_row")


def test_the_example_is_installed_and_used(tmp_path: Path) -> None:
    """As its README says, in an environment of its own: packages beside the ones of this one."""
    example = Path(__file__).parents[2] / "examples" / "own_rule"
    copied = tmp_path / "own_rule"
    copied.mkdir()
    for name in ("own_rule.py", "pyproject.toml"):
        (copied / name).write_bytes((example / name).read_bytes())
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(target), str(copied)], check=True)
    program = f"import sys; sys.path.insert(0, {str(target)!r}); from stepsaver.cli import main; sys.exit(main())"
    generate = ["generate", "--model", str(write_model_folder(tmp_path / "model")), "--prompt", "abc", "--json"]
    command = [sys.executable, "-c", program, *generate, "--max-new-tokens", "24", "--rule", "resting_rows:after=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"resting_rows:after=2"' in done.stdout
    wrong = subprocess.run([*command[:-1], "resting_rows:after=0"], capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stderr) == (2, "stepsaver: rule resting_rows: after 0 is not positive\n")
