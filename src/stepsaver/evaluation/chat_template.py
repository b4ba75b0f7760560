"""Renders a checkpoint's chat template in a separate process with limited time and memory."""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError, shown

SCRIPT = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A template, and the texts that it may use in addition to the messages, such as the stop token's."""

    def __init__(self, template: str, texts: Mapping[str, str]) -> None:
        self.template, self.texts = template, dict(texts)
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: list[dict[str, str]], *, opens_answer: bool) -> str:
        values = self.texts | {
            "messages": messages, "tools": None, "documents": None, "add_generation_prompt": opens_answer,
        }  # fmt: skip
        reply = self._ask({"template": self.template, "values": values})
        if "error" in reply:
            raise UsageError(f"the chat template fails: {reply['error']}")
        return str(reply["text"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            return json.loads(line)
        self._process = None
        raise UsageError(f"the chat template took too long, or ended its process ({shown(process.wait())})")

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, process)
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    """Kills the process and waits for it, so that nothing of it is left."""
    process.kill()
    process.communicate()
