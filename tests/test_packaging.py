"""The package as somebody installs it: wheel and sdist, without git, with and without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import stepsaver

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a clone has, and no git."""
    folder = tmp_path_factory.mktemp("clone")
    for name in run("git", "-C", ROOT, "ls-files").splitlines():
        if (ROOT / name).is_file() and not name.startswith(("experiments/", "tests/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=clone, check=True, capture_output=True, timeout=600)
    (found,) = folder.glob("*.tar.gz")
    return found


def wheel_of(source: Path, folder: Path, **environment: str) -> Path:
    shutil.rmtree(source / "build", ignore_errors=True)  # what another build left there would be taken over
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, **environment)
    (found,) = folder.glob("*.whl")
    return found


def generate(site: Path) -> str:
    program = f"import sys; sys.path.insert(0, {str(site)!r}); from stepsaver.cli import main; sys.exit(main())"
    prompt = "Tom has 12 pens and buys 5 more pens. How many pens does Tom have?"
    return run(sys.executable, "-c", program, "generate", "--model", "embedded", "--prompt", prompt)


def where(site: Path) -> str:
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import stepsaver\n"
        "from stepsaver.engine.backends.cpu import library\n"
        "print(stepsaver.__version__, stepsaver.__file__)"
    )
    return run(sys.executable, "-c", program)


@pytest.mark.long
@pytest.mark.parametrize("compiler", [None, "/bin/false"], ids=["compiler", "no compiler"])
@pytest.mark.parametrize("form", ["clone", "sdist"])
def test_an_installed_package_decodes(
    clone: Path, sdist: Path, tmp_path: Path, form: str, compiler: str | None
) -> None:
    environment = {"CC": compiler} if compiler else {}
    wheel = wheel_of(clone if form == "clone" else sdist, tmp_path / "wheels", **environment)
    site = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    assert bool(list(site.rglob("_kernels*.so"))) == (compiler is None)
    assert where(site).split()[0] == stepsaver.__version__
    assert str(site) in where(site)
    assert "17" in generate(site)


@pytest.mark.long
def test_the_wheel_has_what_the_docs_say(clone: Path, tmp_path: Path) -> None:
    wheel = wheel_of(clone, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert "stepsaver/py.typed" in names
    assert "stepsaver/evaluation/embedded/model/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests", "examples", "benchmarks"))]
    said = re.search(r"The wheel has about (\d+) MB", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    assert said
    assert abs(wheel.stat().st_size / 1e6 - int(said[1])) < 1


@pytest.mark.long
def test_the_sdist_builds_what_it_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "src/stepsaver/engine/backends/cpu").glob("*.[ch]")}
    assert sources | {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "stepsaver.__version__"}
    assert f"## {stepsaver.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from stepsaver.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"stepsaver {stepsaver.__version__}\n"


def test_what_the_sanitizers_run_is_there() -> None:
    from tools.sanitize import SHARE

    assert [path for path in SHARE if not (Path(__file__).parents[1] / path).is_file()] == []
