"""Reports and traces as one HTML file each: scripts and data inside, no server and no network.

No text of a model is ever read as markup.
"""

import base64
import gzip
import hashlib
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Template

if TYPE_CHECKING:
    from stepsaver.report.trace_data import TraceDocument


def report_page(title: str, lead: str, about: str, tabs: list[dict[str, Any]], samples: dict[str, Any]) -> str:
    """Returns a page of tabs. `samples`, by tab, are packed, and unpacked only when a reader gets there."""
    from plotly.offline import get_plotlyjs

    script, plotly = _template("report.js"), get_plotlyjs()
    assert "</script" not in plotly.lower(), "the library's script can stand inside the page"
    return Template(_template("report.html")).render(
        style=_template("report.css"),
        script=script,
        plotly=plotly,
        script_hashes=" ".join(f"'sha256-{_hash(each)}'" for each in (plotly, script)),
        data=json_in_html({"title": title, "lead": lead, "about": about, "tabs": tabs}),
        samples=_packed(samples),
    )


def trace_page(document: "TraceDocument") -> str:
    style, script = _template("trace.css"), _template("trace.js")
    return Template(_template("trace.html")).render(
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script), data=json_in_html(document)
    )


def json_in_html(document: Any) -> str:
    """Returns JSON that cannot end the script element it is in, nor open a comment or an entity."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _packed(content: Any) -> str:
    """Returns JSON, gzipped, in letters that mean nothing to HTML."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _template(name: str) -> str:
    return (files("stepsaver.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the hash with which the page's content security policy allows this text to run, and nothing else."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
