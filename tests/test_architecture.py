"""What the documents promise about the code: import direction, commands, links, sizes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepsaver.cli import main

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "stepsaver"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

# What each part may import of the others.
ALLOWED = {
    "engine": {"engine"},
    "evaluation": {"engine", "evaluation"},
    "bench": {"engine", "evaluation", "bench"},
    "tune": {"engine", "evaluation", "bench", "tune"},
    "report": {"engine", "evaluation", "bench", "report"},
    "api": {"engine", "evaluation", "bench", "report", "api", "extras"},
    "commands": {"engine", "evaluation", "bench", "tune", "report", "commands", "extras"},
}
ENGINE_PACKAGES = {"torch", "numpy", "safetensors", "stepsaver"}


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_go_one_way(part: str) -> None:
    files = list((SOURCE / part).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            if name.startswith("stepsaver."):
                assert name.split(".")[1] in ALLOWED[part], f"{path.relative_to(ROOT)} imports {name}"


def test_every_module_that_is_imported_is_there() -> None:
    """Most imports wait for their use, and no other test would miss a module that was renamed."""
    for path in SOURCE.rglob("*.py"):
        for name in imported_modules(path):
            file = SOURCE.parent.joinpath(*name.split("."))
            is_there = name.split(".")[0] != "stepsaver" or file.is_dir() or file.with_suffix(".py").exists()
            assert is_there, f"{path.relative_to(ROOT)} imports {name}"


# Where decoding starts: from here on nothing is imported that the package does not require.
DECODING = ("cli", "extending", "api.model", "commands.generate", "commands.score", "report.html_pages")
REQUIRED = {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "stepsaver"}


def imported_with(path: Path) -> set[str]:
    """The modules that come with a module; imports inside functions wait for their use, those for types never come."""
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    names = {alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names}
    return names | {str(each.module) for each in statements if isinstance(each, ast.ImportFrom)}


@pytest.mark.parametrize("start", DECODING)
def test_decoding_imports_only_what_is_required(start: str) -> None:
    waiting, seen = [f"stepsaver.{start}"], set[str]()
    while waiting:
        name = waiting.pop()
        path = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for other in imported_with(path):
            package = other.split(".")[0]
            assert package in REQUIRED | set(sys.stdlib_module_names), f"{name} imports {other}, which is optional"
            waiting += [other] if package == "stepsaver" else []


def test_engine_imports_torch_numpy_and_safetensors_only() -> None:
    standard = set(sys.stdlib_module_names)
    for path in (SOURCE / "engine").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imported_modules(path)} - standard - ENGINE_PACKAGES
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), f"{document.name} links to {target}"


def test_readme_names_real_commands(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"^ {4}(\w+)", capsys.readouterr().out, re.MULTILINE))
    named = set(re.findall(r"^stepsaver (\w+)", readme, re.MULTILINE))
    assert named
    assert named <= known
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE)) <= targets


def test_readme_example_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert example
    done = subprocess.run([sys.executable, "-c", example[1]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "21" in done.stdout  # pens


def test_every_rule_and_policy_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    from stepsaver.engine import registry

    for made in registry.found_in("stepsaver.engine.rules").values():
        assert "Source:" in (made.__doc__ or ""), made
    for made in registry.found_in("stepsaver.engine.policies").values():
        assert made.__doc__, made
