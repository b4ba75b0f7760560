"""A trace as one HTML file that plays it: no server, no network, and no text of a model is ever read as markup."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Template

from stepsaver.report.trace_data import TraceDocument


def trace_page(document: TraceDocument) -> str:
    style, script = read_template("trace.css"), read_template("trace.js")
    return Template(read_template("trace.html")).render(
        style=style,
        style_hash=content_hash(style),
        script=script,
        script_hash=content_hash(script),
        data=json_in_html(document),
    )


def json_in_html(document: Any) -> str:
    """Returns JSON that cannot end the script element it is in, nor open a comment or an entity."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def read_template(name: str) -> str:
    return (files("stepsaver.report") / "templates" / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """Returns the hash with which the page's content security policy allows this text to run, and nothing else."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
