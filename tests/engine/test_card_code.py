"""The kernels that torch's compiler makes of our functions for three cards, none of which is here."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import TESTS

# Of each function; a forward of one sample is counted from these (`test_null_device.py`).
KERNELS = {
    "add_and_norm": 1,
    "rotate_and_store": 2,
    "fold": 1,
    "pack": 1,
    "silu_product": 1,
    "choose_token": 6,
}

WITH_HEAD_NORMS = {"rotate_and_store": 4}


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which compiles for cards")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("card", "options"), [(75, []), (80, ["head_norms"]), (90, [])])
def test_functions_become_so_many_kernels_and_nothing_is_copied(card: int, options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.engine.card_code", str(card), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {title.partition(",")[0] for title in report} == KERNELS.keys()
    for title, found in report.items():
        name = title.partition(",")[0]
        assert found["calls"].keys() == {"triton"}, f"{title} calls or copies something else"
        assert found["calls"]["triton"] <= (WITH_HEAD_NORMS if options else {}).get(name, KERNELS[name]), title
        taken = [cubin for kernel in found["kernels"] for cubin in kernel]
        assert not any(cubin["STACK"] for cubin in taken), f"{title} spills"
