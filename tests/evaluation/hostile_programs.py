"""Programs that set out to pass, to end the scoring, or to leave the sandbox. None of them knows how to multiply.

`product(left, right)` is what the tests ask for.
"""

TESTS = """
def check(candidate):
    assert candidate(6, 7) == 42, "six times seven"
    assert candidate(3, -5) == -15
    for number in range(4):
        assert candidate(number, number) == number * number
"""
# The same in the way in which some tests are written: whatever a call raises is caught.
FORGIVING_TESTS = """
def check(candidate):
    right = 0
    for number in range(9):
        try:
            right += candidate(number, 3) == 3 * number
        except BaseException:
            right += 1
    assert right == 9
"""

_WRONG = "def product(left, right): return None\n"
_IMPORTS = "import ctypes, gc, json, os, signal, socket, struct, subprocess, sys, threading, time, types\n"
_CHANNEL = """
C = int(sys.argv[1])
def frame(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    os.write(C, struct.pack(">I", len(data)) + data)
"""


def _at_load(code: str) -> str:
    return f"{_IMPORTS}{_CHANNEL}{_WRONG}{code}\n"


def _in_call(code: str) -> str:
    body = "".join(f"    {line}\n" for line in code.splitlines())
    return f"{_IMPORTS}{_CHANNEL}def product(left, right):\n{body}"


def _returning(expression: str, before: str = "") -> str:
    return f"{_IMPORTS}{before}\ndef product(left, right): return {expression}\n"


_EQUAL = "\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = None\n"
_RAW_X86 = """
import mmap, platform
code = {code!r} if platform.machine() == 'x86_64' else b''
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int)(address)()
"""

REPORTS = {
    "write passed to every descriptor": _at_load(
        "for n in range(64):\n    try: os.write(n, b'passed')\n    except OSError: pass"
    ),
    "write a report to every descriptor": _at_load(
        "for n in range(64):\n"
        "    try: os.write(n, b'ready\\n' + json.dumps({'passed': True, 'reason': 'passed'}).encode())\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "write passed to descriptor 3": _at_load(
        "for n in (3, 1):\n    try: os.write(n, b'passed')\n    except OSError: pass\nos._exit(0)"
    ),
    "print a report": _at_load('print(\'{"passed": true, "reason": "passed"}\', flush=True); os._exit(0)'),
    "patched os.write": _at_load("real = os.write\nos.write = lambda n, data: real(n, b'passed')"),
    "patched json": _at_load('json.dumps = lambda *_, **__: \'{"passed": true, "reason": "passed"}\''),
    "report of __main__": _at_load("import __main__\n__main__.report = __main__.outcome = 'passed'"),
    "exit after a report at exit": _at_load(
        "import atexit\natexit.register(lambda: os.write(C, b'passed'))\nsys.exit(0)"
    ),
    "every dict of the process": _at_load(
        "for each in gc.get_objects():\n"
        "    if isinstance(each, dict):\n"
        "        for key in ('passed', 'fault', 'reason', 'raised', 'outcome'):\n"
        "            if key in each: each[key] = True"
    ),
    "every function of the process": _at_load(
        "def yes(*_, **__): return {'passed': True, 'value': True}\n"
        "for each in gc.get_objects():\n"
        "    if isinstance(each, types.FunctionType) and each.__name__ in ('encode', 'outcome_of', 'judge', 'ask'):\n"
        "        each.__code__ = yes.__code__"
    ),
    "frames of the callers": _in_call(
        "frame = sys._getframe(1)\nwhile frame:\n"
        "    for key in list(frame.f_locals): frame.f_locals[key] = 'passed'\n"
        "    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)\n"
        "    frame = frame.f_back"
    ),
    "a judge of its own": _at_load(
        "from stepsaver.evaluation.sandboxed import judge, messages\njudge.judge = lambda *_: None\n"
        "messages.Cut = Exception\nframe({'passed': True, 'reason': 'passed'})"
    ),
    "a judge of its own that runs": _at_load(
        "from stepsaver.evaluation.sandboxed import judge\nsys.stdin = open('/dev/null')\njudge.main(str(C))"
    ),
    "check that never fails": _at_load("def check(candidate): return True\ncandidate = check"),
    "AssertionError that is none": _at_load("import builtins\nbuiltins.AssertionError = type('A', (), {})"),
    "a trace function": _at_load("sys.settrace(lambda *_: None); sys.setprofile(lambda *_: os._exit(0))"),
    "an import hook": _at_load("import builtins\nbuiltins.__import__ = lambda *_, **__: types.SimpleNamespace()"),
    "an exception hook": _at_load("sys.excepthook = lambda *_: os.write(C, b'passed')\nraise SystemExit('passed')"),
}

ANSWERS = {
    "equal to everything": _returning("Any()", "class Any:" + _EQUAL),
    "an int equal to everything": _returning("Any(1)", "class Any(int):" + _EQUAL),
    "a str equal to everything": _returning("Any('1')", "class Any(str):" + _EQUAL),
    "a list equal to everything": _returning("Any()", "class Any(list):" + _EQUAL),
    "a float equal to everything": _returning("Any(1.5)", "class Any(float):" + _EQUAL),
    "a class equal to everything": _returning("Any", f"class Meta(type):{_EQUAL}\nclass Any(metaclass=Meta): pass"),
    "mock.ANY": _returning("ANY", "from unittest.mock import ANY"),
    "a lie about its class": _returning("Any()", f"class Any:{_EQUAL}    __class__ = int"),
    "a pickle": _returning("b'cos\\nsystem\\n(S\"true\"\\ntR.'"),
    "a Decimal that is not a number": _returning("Decimal('NaN')", "from decimal import Decimal"),
    "a Decimal beyond all": _returning("Decimal('1e999999999')", "from decimal import Decimal"),
    "nan": _returning("float('nan')"),
    "a very long integer": _returning("10 ** 200000"),
    "an integer of a megabyte": _returning("1 << (8 << 20)"),
    "a list in itself": _returning("loop", "loop = []\nloop.append(loop)"),
    "a very deep list": _returning("deep", "deep = []\nfor _ in range(100000): deep = [deep]"),
    "an iterator without end": _returning("itertools.count()", "import itertools"),
    "a string of 300 MB": _returning("'x' * 300_000_000"),
    "True": _returning("True"),
    "an encoded object": _returning("{'object': True, 'value': 42}"),
    "changed arguments": _in_call("left = right = 0\nproduct.__defaults__ = (0, 0)\nreturn 0"),
    "frames that are no message": _in_call("frame(b'passed')"),
    "a frame of a verdict": _in_call("frame({'passed': True, 'reason': 'passed'})"),
    "a frame that ends the judge": _in_call("frame({'raised': ['SystemExit', '0']})"),
    "a frame that interrupts the judge": _in_call("frame({'raised': ['KeyboardInterrupt', '']})"),
    "a frame that calls a builtin": _in_call("frame({'raised': ['exit', '0']})"),
    "a frame with a name that is none": _in_call("frame({'raised': ['\\x00' * 50, '\\ud800' * 50]})"),
    "a frame with half an exception": _in_call("frame({'raised': ['AssertionError']})"),
    "a frame with an unknown kind": _in_call("frame({'value': {'__import__': 'os'}})"),
    "a frame with two kinds": _in_call("frame({'value': {'tuple': [], 'set': []}})"),
    "a frame with an unhashable key": _in_call("frame({'value': {'dict': [[[], 1]]}})"),
    "a frame with an endless range": _in_call("frame({'value': {'range': [0, 1 << 60, 1]}})"),
    "a frame of brackets": _in_call("frame(b'[' * 1000000)"),
    "a frame of a long number": _in_call("frame(b'{\"value\": ' + b'9' * 900000 + b'}')"),
    "a frame of nested tuples": _in_call("frame(b'{\"value\":' + b'{\"tuple\":[' * 50000 + b']}' * 50000 + b'}')"),
    "answers before the questions": _at_load("for _ in range(20): frame({'value': 42})"),
    "an exception called Cut": _in_call("raise type('Cut', (BaseException,), {})('passed')"),
    "an exception without a text": _in_call(
        "class Bad(Exception):\n    def __str__(self): raise SystemExit(0)\nraise Bad()"
    ),
    "a text of a megabyte": _in_call("raise ValueError('\\ud800\\x1b[2J' * 300000)"),
}

ENDINGS = {
    "exit 97": _at_load("os._exit(97)"),
    "exit 0": _at_load("os._exit(0)"),
    "exit 97 in the call": _in_call("os._exit(97)"),
    "sys.exit": _at_load("sys.exit(0)"),
    "sys.exit in the call": _in_call("sys.exit(97)"),
    "KeyboardInterrupt": _at_load("raise KeyboardInterrupt"),
    "GeneratorExit": _in_call("raise GeneratorExit"),
    "StopIteration": _in_call("raise StopIteration"),
    "null pointer": _at_load("ctypes.string_at(0)"),
    "abort": _at_load("os.abort()"),
    "a call of another ABI": _at_load(_RAW_X86.format(code=b"\xb8\x01\x00\x00\x00\xcd\x80\xc3")),  # int 0x80: killed
    "an x32 call": _at_load("assert ctypes.CDLL(None).syscall(0x40000000 + 39) > 0"),
    "a deep stack": _at_load("sys.setrecursionlimit(1 << 30)\ndef deep(): return deep()\ndeep()"),
    "a kill of everybody": _at_load("os.kill(-1, 9)"),
    "a kill of the parent": _at_load("os.kill(os.getppid(), 9)"),
    "a kill of the group": _at_load("signal.signal(15, signal.SIG_IGN)\nos.killpg(0, 9)\nos._exit(0)"),
    "a stop": _at_load("os.kill(os.getpid(), signal.SIGSTOP)\nos._exit(97)"),
    "its own exec": _at_load("os.execv('/bin/sh', ['sh', '-c', 'echo passed >&' + str(C) + '; exit 97'])"),
    "a closed channel": _at_load("os.close(C)"),
    "all descriptors closed": _at_load("os.closerange(0, 64); time.sleep(60)"),
    "the channel as output": _at_load("os.dup2(C, 1); os.dup2(C, 2); print('passed', flush=True)"),
    "a descriptor over the channel": _at_load(
        "s = socket.socket(fileno=os.dup(C))\nsocket.send_fds(s, [b'passed'], [os.open('/dev/null', os.O_RDWR)])"
    ),
    "half a frame": _at_load("os.write(C, b'\\0\\0'); time.sleep(60)"),
    "a flood": _at_load("while True: os.write(C, b'\\xff' * 65536)"),
    "a flood of null bytes": _at_load("while True: os.write(C, bytes(65536))"),
    "a flood of answers": _at_load("while True: frame({'value': None})"),
    "a flood from a thread": _at_load(
        "def flood():\n    while True: frame({'value': 'x' * 1000000})\nthreading.Thread(target=flood).start()"
    ),
    "a flood of output": _at_load("while True: print('passed' * 10000)"),
    "a loop": _at_load("while True: pass"),
    "a sleep in the call": _in_call("time.sleep(60)"),
    "a clock that is turned off": _at_load("signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(60)"),
    "an expression without end": _at_load("import re\nre.match('(a+)+$', 'a' * 60 + 'b')"),
    "a thread that stays": _at_load("threading.Thread(target=time.sleep, args=(60,)).start(); raise ValueError"),
}

# What is refused, and how that looks. Each goes on to fail by itself where it is not.
WALLS = {
    "read the tests in memory": (
        _in_call(
            "for line in open('/proc/self/maps'):\n"
            "    bounds, rights = line.split()[:2]\n"
            "    low, high = (int(each, 16) for each in bounds.split('-'))\n"
            "    if 'r' in rights and high < 1 << 47 and '[v' not in line:\n"
            "        found = re.search(rb'six time[s] seve[n]', ctypes.string_at(low, high - low))\n"
            "        assert not found, 'found'\n"
            "raise LookupError('not found')"
        ).replace("import ctypes", "import re, ctypes"),
        "LookupError: not found",
    ),
    "write its own memory": (
        _in_call(
            "memory = open('/proc/self/mem', 'r+b', buffering=0)\nbuffer = ctypes.create_string_buffer(b'failed')\n"
            "memory.seek(ctypes.addressof(buffer)); memory.write(b'passed')"
        ),
        "AssertionError: six times seven",
    ),
    "descriptors of others": (
        _at_load("assert [p for p in os.listdir('/proc') if p.isdigit()] != ['1']"),
        "AssertionError",
    ),
    "reopen its descriptors": (
        _at_load(
            "for n in sorted(os.listdir('/proc/self/fd')): print(n); open(f'/proc/self/fd/{n}', 'wb').write(b'x')"
        ),
        "OSError|FileNotFoundError|No such device",
    ),
    "trace": (_at_load("assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0"), "AssertionError"),
    "write another's memory": (
        _at_load("assert ctypes.CDLL(None).process_vm_writev(1, 0, 0, 0, 0, 0) == 0"),
        "Assertion",
    ),
    "take another's descriptor": (_at_load("os.pidfd_open(1)"), "PermissionError"),
    "outlive its parent": (_at_load("assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0"), "AssertionError"),
    "a session of its own": (_at_load("os.setsid()"), "PermissionError"),
    "signals to its group": (
        _at_load("os.killpg(0, 9); os.kill(0, 9); raise LookupError('alone')"),
        "LookupError: alone",
    ),
    "processes": (_at_load("while True: os.fork()"), "PermissionError"),
    "a subprocess": (_at_load("subprocess.run(['/bin/true'])"), "PermissionError"),
    "posix_spawn": (_at_load("os.posix_spawn('/bin/true', ['true'], {})"), "PermissionError"),
    "multiprocessing": (
        _at_load("import multiprocessing\nmultiprocessing.Pool(2)"),
        "PermissionError|FileNotFoundError",
    ),
    "threads without end": (
        _at_load("while True: threading.Thread(target=time.sleep, args=(60,)).start()"),
        "can't start",
    ),
    "vsock": (_at_load("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"), "Address family not supported"),
    "every family": (
        _at_load(
            "for family in range(64):\n    for kind in (1, 2, 3, 5, 10):\n"
            "        for make in (socket.socket, socket.socketpair):\n"
            "            try: make(family, kind, 0)\n"
            "            except OSError as error: assert error.errno in (97, 93, 94, 95), (family, kind, error)\n"
            "            else: assert family == socket.AF_UNIX and make is socket.socketpair, (family, make)\n"
            "raise LookupError('none')"
        ),
        "LookupError: none",
    ),
    "the internet": (_at_load("socket.create_connection(('1.1.1.1', 80), timeout=1)"), "Address family not supported"),
    "this machine": (
        _at_load("socket.create_connection(('127.0.0.1', 22), timeout=1)"),
        "Address family not supported",
    ),
    "a server": (_at_load("socket.socketpair()[0]; socket.create_server(('', 8000))"), "Address family not supported"),
    "memory at once": (_at_load("kept = bytearray(1 << 30)"), "MemoryError"),
    "memory in parts": (_at_load("kept = []\nwhile True: kept.append('x' * 1000000)"), "MemoryError"),
    "its limits": (
        _at_load("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
        "not allowed|ValueError",
    ),
    "shared memory": (_at_load("assert ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) >= 0"), "AssertionError"),
    "a message queue": (_at_load("assert ctypes.CDLL(None).mq_open(b'/x', 66, 384, 0) >= 0"), "AssertionError"),
    "a namespace": (_at_load("assert ctypes.CDLL(None).unshare(0x10000000) == 0"), "AssertionError"),
    "a mount": (_at_load("assert ctypes.CDLL(None).mount(b'proc', b'/tmp', b'proc', 0, 0) == 0"), "AssertionError"),
    "a memory file": (_at_load("os.ftruncate(os.memfd_create('kept'), 1 << 28)"), "too large"),
    "a big file": (_at_load("open('/tmp/big', 'wb').write(b'0' * (8 << 20))"), "too large|No space"),
    "many files": (_at_load("for n in range(100): open(f'/tmp/{n}', 'wb').write(b'0' * 500000)"), "No space|Too many"),
    "names": (_at_load("for n in range(100000): open(f'/tmp/{n}', 'w').close()"), "No space"),
    "a system file": (_at_load("open('/usr/x', 'w')"), "Read-only"),
    "a file in the root": (_at_load("open('/x', 'w')"), "Read-only|Permission"),
    "the sandbox's own files": (_at_load("open('/sandbox/sandboxed/judge.py', 'a')"), "Read-only|Permission"),
    "root": (_at_load("os.setuid(0)"), "Permission|Invalid"),
    "another root folder": (_at_load("os.chroot('/tmp')"), "Permission"),
    "a kernel's setting": (_at_load("open('/proc/sys/kernel/core_pattern', 'w').write('|/x')"), "Read-only|Permission"),
    "no syntax": ("def broken(:", "SyntaxError"),
    "a null byte": ("x = '\0'", "null bytes|SyntaxError"),
    "a lone surrogate": (_WRONG + "x = '\ud800'", "UnicodeEncodeError"),
    "no function": ("pass", "NameError"),
}

# These do not end by themselves.
ENDLESS = {
    "a deep stack",
    "half a frame",
    "a flood of output",
    "a loop",
    "a sleep in the call",
    "a clock that is turned off",
    "an expression without end",
}
FORGERIES = {**REPORTS, **ANSWERS, **ENDINGS, **{name: program for name, (program, _) in WALLS.items()}}
