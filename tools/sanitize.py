"""Runs the engine's tests, and configurations drawn at random, with kernels under ASan and UBSan.

The package is copied into a folder of its own, `build/sanitized`, and its kernels are compiled there. Every access that
leaves its memory, and every undefined operation of C, ends the run. `--all` runs everything, else a fixed share.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from stepsaver.engine.backends.cpu.library import SOURCES, source_hash

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "build" / "sanitized" / "stepsaver"
KERNELS = PACKAGE / "engine" / "backends" / "cpu"
FLAGS = ["-shared", "-fPIC", "-O2", "-g", "-w", "-Wno-psabi", "-fopenmp"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
TESTED = ("kernels", "tiles", "layers", "suffix_dropout", "random_configurations")
SHARE = [f"tests/engine/test_{name}.py" for name in TESTED]
# Python and torch leave memory behind, and a refused allocation of a test returns nothing, as without the sanitizer.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
LEFT_OUT = "not fifteen_per_cent and not memory"  # sizes of a process, which are others here


def preloaded(compiler: str) -> list[str]:
    """The sanitizers' libraries, which Python has to load first; empty where the compiler has none."""
    named = (["-print-file-name=libasan.so"], ["-print-file-name=libubsan.so"])
    found = [subprocess.run([compiler, *each], capture_output=True, text=True).stdout.strip() for each in named]
    return found if all(Path(each).is_absolute() for each in found) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the engine's tests and 1,000 random configurations")
    parser.add_argument("--workers", default="2", metavar="N", help="processes of pytest")
    args = parser.parse_args()
    compiler = next((each for each in (os.environ.get("CC"), "gcc", "cc") if each and shutil.which(each)), None)
    libraries = preloaded(compiler) if compiler else []
    if not compiler or not libraries:
        print(f"sanitizers: skipped, {'the compiler has no ASan and UBSan' if compiler else 'there is no compiler'}")
        return 0
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "stepsaver", PACKAGE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    built = KERNELS / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [str(KERNELS / name) for name in SOURCES if name.endswith(".c")]
    stamp = f'-DSOURCE_HASH="{source_hash()}"'
    subprocess.run([compiler, *FLAGS, *SANITIZERS, stamp, *sources, "-o", str(built)], check=True)
    environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(libraries), "PYTHONPATH": str(PACKAGE.parent)}
    check = "from stepsaver.engine.backends.cpu import library as l; assert l.is_loaded(), l.problem; print(l.FOLDER)"
    subprocess.run([sys.executable, "-c", check], env=environment, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", args.workers, "-k", LEFT_OUT]
    runs = [[*SHARE, "-m", "not long"]]
    if args.all:
        runs = [["tests/engine", "-m", "not long"], ["tests/engine/test_random_configurations.py", "-m", "long"]]
    environment["OMP_NUM_THREADS"] = "1"
    return int(any(subprocess.run([*command, *run], env=environment, cwd=ROOT).returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main())
