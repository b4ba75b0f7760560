"""The notebook of `examples/` runs from its first cell to its last."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell in one namespace, as a kernel runs it; a cell's last expression is what it shows."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown: list[str] = []
    for cell in cells:
        assert cell["outputs"] == [], "outputs are made by who runs it, and not committed"
        tree = ast.parse("".join(cell["source"]))
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), namespace)
        if last is not None:
            shown.append(repr(eval(compile(last, str(NOTEBOOK), "eval"), namespace)))
    assert "17" in capsys.readouterr().out
    assert any("plain" in each and "speed-up" in each for each in shown)
    assert (tmp_path / "comparison.html").stat().st_size > 10_000
