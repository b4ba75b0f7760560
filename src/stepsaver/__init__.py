"""An engine and a bench for cross-step compute reuse in block-diffusion language models.

    import stepsaver
    model = stepsaver.load("embedded")
    for text in model.generate(["Tom has 12 pens and buys 5. How many has he?"], rules=["near_rows", "trim"]):
        print(text)

The names exported here are the public interface, together with `stepsaver.extending` for your own rules, policies and
architectures. Everything else may change. Names are imported on first use, because torch takes seconds to import and
`stepsaver --help` does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.api.compare import ComparedConfig, Comparison, compare
    from stepsaver.api.model import Model, Piece, load
    from stepsaver.engine.score import Score

__version__ = "0.1.0"  # written only here; pyproject.toml reads it
__all__ = ["ComparedConfig", "Comparison", "Model", "Piece", "Score", "UsageError", "compare", "load"]

_WHERE = {
    "ComparedConfig": "stepsaver.api.compare",
    "Comparison": "stepsaver.api.compare",
    "Model": "stepsaver.api.model",
    "Piece": "stepsaver.api.model",
    "Score": "stepsaver.engine.score",
    "compare": "stepsaver.api.compare",
    "load": "stepsaver.api.model",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
