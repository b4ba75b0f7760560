"""Hostile programs. Each is contained, and reported as failed."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import stepsaver
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation import sandbox
from stepsaver.evaluation.sandbox import CannotIsolate, Limits, Outcome, require_sandbox, run_program

SHORT = Limits(seconds=0.5, memory_bytes=256 << 20)


def _can_isolate() -> bool:
    try:
        return run_program("pass").passed
    except CannotIsolate:
        return False


needs_namespaces = pytest.mark.skipif(not _can_isolate(), reason="this machine allows no namespaces")


@needs_namespaces
@pytest.mark.parametrize(
    "program",
    ["assert 1 + 1 == 2", "import math, re, json, collections", "print('x' * 10)", "open('/tmp/x', 'w').write('y')"],
)
def test_honest_programs_pass(program: str) -> None:
    assert run_program(program, SHORT) == Outcome(True, "passed")


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert False, 'wrong'", "AssertionError: wrong"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "without a result"),
        ("while True: pass", "timed out after 0.5 s"),
        ("import time; time.sleep(60)", "timed out after 0.5 s"),
        ("import signal, time; signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(60)", "timed out"),
        ("while True: print('x' * 1000)", "timed out after 0.5 s"),
        ("kept = bytearray(1 << 30)", "MemoryError"),
        ("kept = []\nwhile True: kept.append('x' * 1000000)", "MemoryError"),
        ("import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) >= 0", "AssertionError"),
        ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
        ("import os\nos.ftruncate(os.memfd_create('kept'), 1 << 28)", "too large"),
        ("open('/tmp/big', 'wb').write(b'0' * (8 << 20))", "too large|No space"),
        ("for n in range(100): open(f'/tmp/{n}', 'wb').write(b'0' * 500000)", "No space|Too many"),
        ("for n in range(100000): open(f'/tmp/{n}', 'w').close()", "No space"),
        ("open('/usr/x', 'w')", "Read-only"),
        ("open('/x', 'w')", "Read-only|Permission"),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), timeout=1)", "unreachable"),
        ("import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)", "unreachable"),
        ("import os; os.setuid(0)", "Permission|Invalid"),
        ("import os; os.chroot('/tmp')", "Permission"),
        ("import os; os.kill(-1, 9)", "ProcessLookupError"),
        ("raise BaseException('\\ud800' * 10 + 'x' * 100000)", "BaseException"),
    ],
)
def test_hostile_programs_fail(program: str, reason: str) -> None:
    outcome = run_program(program, SHORT)
    assert not outcome.passed
    assert re.search(reason, outcome.reason), outcome.reason
    assert len(outcome.reason) < 1100


@needs_namespaces
def test_a_fork_bomb_leaves_nothing_behind() -> None:
    marker = f"bomb{os.getpid()}"
    run_program(f"import os\n{marker} = 1\nwhile True:\n    try: os.fork()\n    except OSError: pass", SHORT)
    found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if marker.encode() in _content(p)]
    children = [p for p in Path("/proc").glob("[0-9]*/status") if f"PPid:\t{os.getpid()}\n".encode() in _content(p)]
    assert found == []
    assert not [p for p in children if b"sandbox_child" in _content(p.parent / "cmdline")]


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
        "status = open('/proc/self/status').read()\n"
        "assert 'CapEff:\\t0000000000000000' in status and 'NoNewPrivs:\\t1' in status\n"
    )
    assert run_program(search, SHORT) == Outcome(True, "passed")


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="root can become an ordinary user")
def test_an_ordinary_user_has_the_same_walls() -> None:
    """The same through a user namespace, with an interpreter that an ordinary user can reach."""
    interpreter = Path("/usr/bin/python3")
    if not interpreter.exists():
        pytest.skip("no interpreter that an ordinary user can reach")
    with tempfile.TemporaryDirectory() as folder:
        _copy_package(Path(folder))
        reasons = _reasons_as_ordinary_user(interpreter, Path(folder))
    assert reasons[0] == "passed"
    assert reasons[1].startswith("timed out")
    assert "BlockingIOError" in reasons[2]
    assert "unreachable" in reasons[3]
    assert "AssertionError" in reasons[4]


def _copy_package(folder: Path) -> None:
    """The few files that the sandbox is made of, where everybody may read them."""
    source = Path(stepsaver.__file__).parent
    for name in ("__init__.py", "engine/__init__.py", "engine/errors.py", "evaluation/__init__.py",
                 "evaluation/sandbox.py", "evaluation/sandbox_child.py"):  # fmt: skip
        (folder / "stepsaver" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, folder / "stepsaver" / name)
    folder.chmod(0o755)


def _reasons_as_ordinary_user(interpreter: Path, folder: Path) -> list[str]:
    programs = [
        "pass",
        "while True: pass",
        "import os; os.fork()",
        "import socket; socket.create_connection(('1.1.1.1', 80), 1)",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
    ]
    code = (
        "from stepsaver.evaluation.sandbox import CannotIsolate, Limits, run_program\n"
        f"for program in {programs!r}:\n"
        "    try: print(run_program(program, Limits(seconds=0.5)).reason)\n"
        "    except CannotIsolate: print('forbidden')\n"
    )
    done = subprocess.run(
        [interpreter, "-c", code], cwd=folder, user=1234, group=1234, extra_groups=[], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "forbidden" in done.stdout:
        pytest.skip("ordinary users may not make namespaces here")
    return done.stdout.splitlines()


@needs_namespaces
def test_the_clock_is_kept() -> None:
    started = time.perf_counter()
    run_program("while True: pass", Limits(seconds=0.3))
    assert time.perf_counter() - started < 5.0


def test_nothing_runs_without_a_confirmation() -> None:
    with pytest.raises(UsageError, match="--confirm-run-unsafe-code"):
        require_sandbox(confirmed=False, task="humaneval")


def test_where_namespaces_are_forbidden_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os; os.write(1, b'unshare: Operation not permitted'); os._exit(97)")
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(UsageError, match="cannot contain it: unshare: Operation not permitted"):
        require_sandbox(confirmed=True, task="humaneval")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
