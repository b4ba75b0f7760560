"""Reports as one HTML file each: plotly's script and all data inside, no server and no network."""

import base64
import gzip
import json
from typing import Any

from jinja2 import Template
from plotly.offline import get_plotlyjs

from stepsaver.report.trace_page import content_hash, json_in_html, read_template


def report_page(title: str, lead: str, about: str, tabs: list[dict[str, Any]], samples: dict[str, Any]) -> str:
    """Returns a page of tabs. `samples`, by tab, are packed, and unpacked only when a reader gets there."""
    style, script, plotly = read_template("report.css"), read_template("report.js"), get_plotlyjs()
    assert "</script" not in plotly.lower(), "the library's script can stand inside the page"
    document = {"title": title, "lead": lead, "about": about, "tabs": tabs}
    return Template(read_template("report.html")).render(
        style=style,
        script=script,
        plotly=plotly,
        script_hashes=" ".join(f"'sha256-{content_hash(each)}'" for each in (plotly, script)),
        data=json_in_html(document),
        samples=_packed(samples),
    )


def _packed(content: Any) -> str:
    """Returns JSON, gzipped, in letters that mean nothing to HTML."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
