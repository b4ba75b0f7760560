"""What decoding needs, and how the parts that it does not need are asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from stepsaver.extras import PARTS
from tests.evaluation.tiny_folder import write_model_folder

ALLOWED = {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "markupsafe", "stepsaver"}
# Whatever is not there raises as it does where it is not installed.
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted({*PARTS, "transformers", "huggingface_hub"})!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from stepsaver.cli import main
sys.exit(main())
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


def test_importing_the_package_imports_no_library() -> None:
    program = (
        "import sys, stepsaver, stepsaver.cli; stepsaver.cli.build_parser('generate')\n"
        "print({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'stepsaver'})"
    )
    done = run(program)
    assert not {"torch", "numpy", *PARTS} & set(ast.literal_eval(done.stdout)), done.stderr


def test_decoding_does_not_import_the_compiler(folder: Path) -> None:
    """Torch imports it, in seconds, for operations on tensors without numbers that it has no kernel for."""
    program = "import sys; from stepsaver.cli import main; main(); print('torch._dynamo' in sys.modules)"
    done = run(program, "generate", "--model", folder, "--prompt", "hi", "--max-new-tokens", "8")
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_decoding_imports_what_it_needs_and_no_more(folder: Path) -> None:
    """Nothing of ours or of what we ask for: torch has imports of its own, which depend on what is installed."""
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "from stepsaver.cli import main; code = main(sys.argv[1:])\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print('imported', *sorted(names - set(sys.stdlib_module_names))); sys.exit(code)"
    )
    done = run(program, "generate", "--model", folder, "--prompt", "hi", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split()[1:])
    assert not {name for name in imported if not name.startswith("_")} - ALLOWED


@pytest.mark.parametrize(
    "arguments", [("--prompt", "hi"), ("--prompt", "hi", "--trace", "page.html", "--trace-against", "trim")]
)
def test_generate_works_without_the_other_parts(folder: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    given = [str(tmp_path / each) if each.endswith(".html") else each for each in arguments]
    done = run(BLOCKER, "generate", "--model", folder, "--max-new-tokens", "8", *given)
    assert done.returncode == 0, done.stderr


def test_python_works_without_the_other_parts(folder: Path) -> None:
    program = BLOCKER.partition("from stepsaver.cli")[0] + (
        f"import stepsaver; model = stepsaver.load({str(folder)!r})\n"
        "texts = model.generate(['hi', 'you'], rules=['trim'], max_new_tokens=8)\n"
        "print(len(texts), len(model.score([('a', 'b')])))\n"
        "try: stepsaver.compare(model, 'mini_gsm8k', {'plain': []})\n"
        "except stepsaver.UsageError as error: print(error)"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "2 1"
    assert done.stdout.splitlines()[1].endswith(": pip install 'stepsaver[bench]'")


def test_score_works_without_the_other_parts(folder: Path, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"context": "a", "continuation": "b"}\n')
    done = run(BLOCKER, "score", "--model", folder, "--requests", requests)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [("run", "00_baseline"), ("list", "tasks"), ("status", "00_baseline"), ("demo",)])
def test_a_part_that_is_missing_is_one_line_with_the_command_that_installs_it(command: tuple[str, ...]) -> None:
    done = run(BLOCKER, *command)
    assert done.returncode == 2
    assert done.stderr.startswith("stepsaver: this needs ")
    assert done.stderr.endswith(": pip install 'stepsaver[bench]'\n")
    assert done.stderr.count("\n") == 1


def test_every_module_that_a_part_brings_is_one_of_its_requirements() -> None:
    """The table of parts says what pyproject.toml says."""
    import tomllib

    root = Path(__file__).parents[2]
    parts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, part in PARTS.items():
        package = {"yaml": "pyyaml"}.get(module, module)
        assert any(each.startswith(f"{package}>=") for each in parts[part]), (module, part)
