"""Hostile and honest programs. The hostile ones are contained and fail, the honest ones get what they deserve.

What counts as forging here is a verdict that does not come from the tests. A value that the tests accept is a right
answer, however the program came by it; an object that only claims to be equal is no value.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepsaver
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.sandbox import CannotIsolate, Limits, ProgramResult, require_sandbox, run_program
from tests.evaluation import honest_programs, hostile_programs
from tests.evaluation.honest_programs import RIGHT, VALUES
from tests.evaluation.hostile_programs import ENDINGS, FORGIVING_TESTS, TESTS, WALLS

SHORT = Limits(seconds=0.4, memory_bytes=256 << 20)
# For what ends by itself, so that a busy machine does not decide.
LONG = Limits(seconds=30.0, memory_bytes=256 << 20)
ENDLESS = {*hostile_programs.ENDLESS, *(f"wrong: {name}" for name in honest_programs.ENDLESS)}
PROGRAMS = {
    **hostile_programs.FORGERIES,
    **{f"wrong: {name}": program for name, (program, _) in honest_programs.WRONG.items()},
    **{f"right: {name}": program for name, program in RIGHT.items()},
}
REASONS = {
    **{name: reason for name, (_, reason) in WALLS.items()},
    **{f"wrong: {name}": reason for name, (_, reason) in honest_programs.WRONG.items()},
    **{f"right: {name}": "^passed$" for name in RIGHT},
}
REPORTED = re.compile("(failed: |timed out after )[ -~]*|passed")


def _judged(program: str, tests: str = TESTS, limits: Limits = LONG) -> ProgramResult:
    return run_program(program, tests, entry_point="product", limits=limits)


def _can_isolate() -> bool:
    try:
        return _judged(RIGHT["plain"]).passed
    except CannotIsolate:
        return False


needs_namespaces = pytest.mark.skipif(not _can_isolate(), reason="this machine allows no namespaces")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def test_the_campaign_is_large() -> None:
    assert len(hostile_programs.FORGERIES) >= 100
    assert set(PROGRAMS) >= ENDLESS


@needs_namespaces
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_gets_what_it_deserves(name: str) -> None:
    outcome = _judged(PROGRAMS[name], limits=SHORT if name in ENDLESS else LONG)
    assert _wrong_verdicts({name: (outcome.passed, outcome.reason)}) == {}


def _wrong_verdicts(outcomes: dict[str, tuple[bool, str]]) -> dict[str, tuple[bool, str]]:
    return {
        name: (passed, reason)
        for name, (passed, reason) in outcomes.items()
        if passed != name.startswith("right: ")
        or len(reason) > 400
        or not REPORTED.fullmatch(reason)
        or not re.search(REASONS.get(name, ""), reason)
    }


@needs_namespaces
@pytest.mark.parametrize("name", ["exit 97 in the call", "a sleep in the call"])
def test_tests_that_catch_everything_do_not_hide_an_end(name: str) -> None:
    assert not _judged(ENDINGS[name], FORGIVING_TESTS, SHORT if name in ENDLESS else LONG).passed


@needs_namespaces
def test_values_are_equal_as_they_are_in_one_process() -> None:
    """In both directions: the program gives a value back, and is given what the tests have."""
    program = (
        f"kinds = [{', '.join(given for given, _ in VALUES)}]\ndef product(n, sent): return kinds[n], kinds[n] == sent"
    )
    lines = [
        f"    value, arrived = candidate({n}, sent={expected})\n"
        f"    assert value == {expected} and type(value == 0) is bool, {n}\n"
        f"    assert arrived is True, {n}"
        for n, (_, expected) in enumerate(VALUES)
    ]
    assert _judged(program, "def check(candidate):\n" + "\n".join(lines)) == ProgramResult(True, "passed")


@needs_namespaces
def test_tests_see_what_a_program_raises_and_iterates_and_how_true_it_is() -> None:
    program = (
        "import itertools, re\n"
        "def product(kind):\n"
        "    if kind == 'raise': raise UnicodeDecodeError('utf-8', b'', 0, 1, 'own')\n"
        "    if kind == 'own': raise type('Own', (ValueError,), {})('text')\n"
        "    if kind == 'lookup': return {}['missing']\n"
        "    return {'match': re.match('a', 'a'), 'count': itertools.count(), 'map': map(str, [1, 2])}[kind]\n"
    )
    tests = (
        "def check(candidate):\n"
        "    for kind, name in (('raise', 'UnicodeDecodeError'), ('own', 'Own'), ('lookup', 'KeyError')):\n"
        "        try: candidate(kind)\n"
        "        except Exception as error: assert type(error).__name__ == name\n"
        "        else: assert False\n"
        "    try: candidate('lookup')\n"
        "    except KeyError: pass\n"
        "    assert candidate('match') and candidate('match') != candidate('match')\n"
        "    assert next(candidate('count')) == 0 and list(candidate('map')) == ['1', '2']\n"
    )
    assert _judged(program, tests) == ProgramResult(True, "passed")


@needs_namespaces
def test_tests_are_behind_walls_too() -> None:
    """They come from a data file, which may be anybody's."""
    tests = "import os\ndef check(candidate):\n    assert not os.path.exists('/etc')\n    os.fork()\n"
    assert "PermissionError" in _judged(RIGHT["plain"], tests).reason
    assert "SyntaxError" in _judged(RIGHT["plain"], "def check(").reason


@needs_namespaces
def test_nothing_is_left_running() -> None:
    """Neither after a program that defends itself, nor after a caller that dies."""
    marker = f"marker{os.getpid()}"
    _judged(
        f"import threading, time\n{marker} = 1\nthreading.Thread(target=time.sleep, args=(60,)).start()\nwhile 1: pass",
        limits=SHORT,
    )
    caller = subprocess.Popen(
        [sys.executable, "-c",
         "from stepsaver.evaluation.sandbox import Limits, run_program\n"
         f"run_program('import time; time.sleep(300)', '', entry_point={marker!r}, limits=Limits(seconds=250.0))"],
    )  # fmt: skip
    cells = list(_await_children(caller.pid))
    os.kill(_children(caller.pid)[0], 9)  # the supervisor
    caller.wait()
    deadline = time.monotonic() + 20.0
    while any(Path(f"/proc/{cell}").exists() for cell in cells) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(cells) == 2
    assert not [cell for cell in cells if Path(f"/proc/{cell}").exists()]
    assert not [child for child in _children(os.getpid()) if b"sandboxed" in _content(Path(f"/proc/{child}/cmdline"))]


def _await_children(caller: int) -> Iterator[int]:
    """Judge and program of a caller's supervisor, once both have become interpreters."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        found = [cell for supervisor in _children(caller) for cell in _children(supervisor)]
        roles = [_content(Path(f"/proc/{cell}/cmdline")) for cell in found]
        if any(b"sandboxed.judge" in role for role in roles) and any(b"sandboxed.program" in role for role in roles):
            return iter(found)
        time.sleep(0.01)
    return iter(())


def _children(process: int) -> list[int]:
    lines = {path.parent.name: _content(path) for path in Path("/proc").glob("[0-9]*/status")}
    return [int(name) for name, status in lines.items() if f"PPid:\t{process}\n".encode() in status]


@needs_namespaces
def test_the_parents_secrets_are_out_of_sight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    (tmp_path / "token").write_text("hf_secret_of_the_test")
    tmp_path.chmod(0o755)
    search = (
        "import os, glob\n"
        "found = [v for v in os.environ.values() if 'hf_secret' in v]\n"
        "for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "    found += [path] if b'hf_secret' in open(path, 'rb').read() else []\n"
        f"found += [1] if os.path.exists({str(tmp_path / 'token')!r}) else []\n"
        "found += [f for f in ('/etc', '/home', '/var') if os.path.exists(f)]\n"
        "assert not found, found\n"
        "assert os.getuid() == 65534 and os.getgid() == 65534\n"
        "assert len([p for p in os.listdir('/proc') if p.isdigit()]) == 1\n"
        "assert len(os.listdir('/proc/self/fd')) == 5\n"  # three to nowhere, the channel, and the listing's own
        "status = open('/proc/self/status').read()\n"
        "assert 'CapEff:\\t0000000000000000' in status and 'NoNewPrivs:\\t1' in status\n"
    )
    assert _judged(search + RIGHT["plain"]) == ProgramResult(True, "passed")


@needs_namespaces
@as_root
def test_an_ordinary_user_gets_the_same_verdicts() -> None:
    """The whole campaign through a user namespace, with an interpreter that an ordinary user can reach."""
    interpreter = Path("/usr/bin/python3")
    if not interpreter.exists():
        pytest.skip("no interpreter that an ordinary user can reach")
    with tempfile.TemporaryDirectory() as folder:
        _copy_package(Path(folder))
        subprocess.run([interpreter, "-m", "compileall", "-q", folder], check=True)  # he cannot keep it himself
        outcomes = _outcomes_of_ordinary_user(interpreter, Path(folder))
    assert outcomes.keys() == PROGRAMS.keys()
    assert _wrong_verdicts(outcomes) == {}


def _copy_package(folder: Path) -> None:
    """The few files that the sandbox is made of, where everybody may read them."""
    source = Path(stepsaver.__file__).parent
    inside = [str(path.relative_to(source)) for path in (source / "evaluation" / "sandboxed").glob("*.py")]
    for name in ("__init__.py", "engine/__init__.py", "engine/errors.py", "evaluation/__init__.py",
                 "evaluation/sandbox.py", *inside):  # fmt: skip
        (folder / "stepsaver" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, folder / "stepsaver" / name)
    folder.chmod(0o755)


def _outcomes_of_ordinary_user(interpreter: Path, folder: Path) -> dict[str, tuple[bool, str]]:
    programs = {name: (program, name in ENDLESS) for name, program in PROGRAMS.items()}
    code = (
        "import json, sys\n"
        "from stepsaver.evaluation.sandbox import CannotIsolate, Limits, run_program\n"
        f"short, long = {SHORT}, {LONG}\n"
        "programs, tests = json.load(sys.stdin)\n"
        "def judged(program, is_endless):\n"
        "    outcome = run_program(program, tests, entry_point='product', limits=short if is_endless else long)\n"
        "    return outcome.passed, outcome.reason\n"
        "try: run_program('', tests, entry_point='product')\n"
        "except CannotIsolate: print('{}')\n"
        "else: print(json.dumps({name: judged(*each) for name, each in programs.items()}))\n"
    )
    done = subprocess.run(
        [interpreter, "-c", code], cwd=folder, user=1234, group=1234, extra_groups=[], capture_output=True, text=True,
        input=json.dumps([programs, TESTS]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, tuple[bool, str]] = json.loads(done.stdout)
    if not outcomes:
        pytest.skip("ordinary users may not make namespaces here")
    return outcomes


@needs_namespaces
def test_the_clock_is_kept() -> None:
    started = time.perf_counter()
    _judged("while True: pass", limits=Limits(seconds=0.3))
    assert time.perf_counter() - started < 5.0


def test_nothing_runs_without_a_confirmation() -> None:
    with pytest.raises(UsageError, match="--confirm-run-unsafe-code"):
        require_sandbox(confirmed=False, task="humaneval")


REFUSED = """
import ctypes, sys
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.sandbox import require_sandbox
libc = ctypes.CDLL(None)
{loss}
try: require_sandbox(confirmed=True, task="humaneval")
except UsageError as error: print(error)
"""
# Root that may not administer the system, as in most containers: the bounding set holds for what it starts.
NO_CAPABILITY = "assert libc.prctl(24, 21, 0, 0, 0) == 0"
# A user of a namespace in which no further ones may be made.
NO_NAMESPACES = """
assert libc.unshare(0x10000000) == 0
for name, line in (("setgroups", "deny"), ("uid_map", "1234 0 1"), ("gid_map", "1234 0 1")):
    open(f"/proc/self/{name}", "w").write(line)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""


@needs_namespaces
@as_root
@pytest.mark.parametrize(
    ("loss", "why"), [(NO_CAPABILITY, "Operation not permitted"), (NO_NAMESPACES, "No space left on device")]
)
def test_where_namespaces_are_forbidden_it_refuses(loss: str, why: str) -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED.format(loss=loss)], capture_output=True, text=True)
    beginning = "humaneval runs code that the model wrote, and this machine cannot contain it: "
    assert done.stdout == f"{beginning}clone into namespaces: {why}\n", done.stderr


@needs_namespaces
def test_limits_in_which_nothing_starts_are_no_fault_of_the_program() -> None:
    with pytest.raises(CannotIsolate, match="no interpreter starts within its limits"):
        _judged(RIGHT["plain"], limits=Limits(memory_bytes=1 << 20))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
