"""Programs that do what they are asked, and some that try and are wrong: what the sandbox must tell apart."""

_PRODUCT = "def product(left, right): return left * right\n"

RIGHT = {
    "plain": _PRODUCT,
    "imports": "import math, re, json, random, string, heapq, bisect, functools, operator, copy, datetime, hashlib\n"
    "import collections, itertools, dataclasses, typing, decimal, fractions, statistics, enum, abc, asyncio, socket\n"
    "import subprocess, multiprocessing, urllib.request, unittest, doctest, ssl, sqlite3, ctypes, inspect, pickle\n"
    + _PRODUCT,
    "output": "import sys\nprint('x' * 5_000_000)\nsys.stderr.write('y' * 5_000_000)\n" + _PRODUCT,
    "output in the call": "def product(left, right):\n    print('x' * 2_000_000)\n    return left * right\n",
    "a file": "open('/tmp/x', 'w').write('y')\nassert open('/tmp/x').read() == 'y'\n" + _PRODUCT,
    "threads": "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "def product(left, right):\n"
    "    with ThreadPoolExecutor(4) as pool: return sum(pool.map(lambda sign: sign * left * right, [1, 1, -1]))\n",
    "asyncio": "import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x\n"
    "def product(left, right): return asyncio.run(later(left)) * right\n",
    "recursion": "def product(left, right):\n    if right < 0: return -product(left, -right)\n"
    "    return 0 if right == 0 else left + product(left, right - 1)\n"
    "def deep(n): return 0 if n == 0 else deep(n - 1)\n"
    "deep(900)\n",
    "a dataclass": "from __future__ import annotations\n"
    "from dataclasses import dataclass, field\nfrom typing import ClassVar\n"
    "@dataclass(order=True)\nclass Pair:\n    left: int\n"
    "    right: int = field(default=0)\n    kinds: ClassVar[int] = 1\n"
    "def product(left: int, right: int) -> int:\n    pair = Pair(left, right)\n    return pair.left * pair.right\n",
    "a pickle of its own class": "import pickle\nclass Box:\n    def __init__(self, x): self.x = x\n"
    "def product(left, right): return pickle.loads(pickle.dumps(Box(left * right))).x\n",
    "a main block": _PRODUCT + "if __name__ == '__main__':\n    assert product(2, 3) == 6\n",
    "a bool and a float": "def product(left, right):\n"
    "    return left * right * 1.0 if left * right > 1 else left * right\n",
    "a Fraction": "from fractions import Fraction\ndef product(left, right): return Fraction(left) * right\n",
    "a Decimal": "from decimal import Decimal\ndef product(left, right): return Decimal(left) * right\n",
    "random": "import random\nrandom.seed(1)\ndef product(left, right):\n"
    "    x = random.random()\n    return round((left - x) * right + x * right)\n",
    "a caught exception": "def product(left, right):\n    try: return {}[left]\n"
    "    except KeyError: return left * right\n",
    "a redefinition": "def product(left, right): return None\n" + _PRODUCT,
}

WRONG = {
    "a sum": ("def product(left, right): return left + right\n", "AssertionError: six times seven"),
    "none": ("def product(left, right): pass\n", "AssertionError: six times seven"),
    "right at first": ("def product(left, right): return abs(left * right)\n", "failed: AssertionError"),
    "text": ("def product(left, right): return str(left * right)\n", "AssertionError: six times seven"),
    "a raise": ("def product(left, right): raise ValueError(left)\n", "ValueError: 6"),
    "a generator": ("def product(left, right): yield left * right\n", "AssertionError: six times seven"),
    "too few parameters": ("def product(left): return left\n", "TypeError: .*positional argument"),
    "another name": ("def multiply(left, right): return left * right\n", "NameError: name 'product' is not defined"),
    "no import": ("def product(left, right): return math.prod([left, right])\n", "NameError: name .*math"),
    "no indentation": ("def product(left, right):\nreturn left * right\n", "IndentationError"),
    "input": ("number = int(input())\n" + _PRODUCT, "EOFError"),
    "an assertion of its own": (_PRODUCT + "assert product(2, 2) == 5, 'own'\n", "AssertionError: own"),
    "recursion without end": ("def product(left, right): return product(left, right)\n", "RecursionError"),
    "a loop without end": ("def product(left, right):\n    while True: pass\n", "timed out after 0.4 s"),
    "a sleep": ("import time\ntime.sleep(60)\n" + _PRODUCT, "timed out after 0.4 s"),
}

ENDLESS = {"a loop without end", "a sleep"}

# Kinds of values, with the expression that the tests compare with: equal here as they are in one process.
VALUES = [
    ("[1, 'a', None, True, 1.5, -0.0]", "[1, 'a', None, True, 1.5, 0.0]"),
    ("(1, (2, [3]), {})", "(1, (2, [3]), {})"),
    ("{1: 'a', (2, 3): {4}}", "{(2, 3): {4}, 1: 'a'}"),
    ("frozenset('ab')", "{'a', 'b'}"),
    ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
    ("__import__('collections').OrderedDict(a=1)", "{'a': 1}"),
    ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "(1, 2)"),
    ("{'a': 1}.keys()", "{'a'}"),
    ("{'a': 1}.items()", "{('a', 1)}"),
    ("range(1, 10, 3)", "range(1, 8, 3)"),
    ("b'\\x00\\xff'", "b'\\x00\\xff'"),
    ("2 ** 70000 - 1", "(1 << 70000) - 1"),
    ("-(2 ** 63)", "-9223372036854775808"),
    ("float('inf')", "float('inf')"),
    ("1e-320", "1e-320"),
    ("complex(1, -2)", "1 - 2j"),
    ("'\\ud800\\u2028\\U0001f600\\x00'", "'\\ud800\\u2028\\U0001f600\\x00'"),
    ("'x' * 500_000", "'x' * 500_000"),
    ("__import__('enum').IntEnum('E', 'A B').B", "2"),
]
