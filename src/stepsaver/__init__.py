"""An engine and a bench for cross-step compute reuse in block-diffusion language models.

    import stepsaver
    model = stepsaver.load()  # the small model that the package brings; or a folder, or a name on the hub
    question = "Tom has 12 pens and buys 5. How many has he?"
    print(model.generate(question, rules=["suffix_dropout", "trim"]))

    for piece in model.stream(question):  # as it is written
        print(piece, end="")
    answer = model.generate(question, rules="trim", details=True)
    print(answer.forwards, answer.positions_saved)
    answer.trace("page.html")  # the decode step by step
    print(stepsaver.compare(model, "mini_gsm8k", {"plain": [], "trim": "trim"}, limit=64))

`stepsaver.rules()` and `stepsaver.policies()` say what there is. The names exported here are the public interface,
together with `stepsaver.extending` for your own rules, policies and architectures. Everything else may change.
"""

import importlib as _importlib
import typing as _typing

from stepsaver.engine.errors import UsageError

if _typing.TYPE_CHECKING:
    from stepsaver.api.answer import Answer
    from stepsaver.api.compare import ComparedConfig, Comparison, compare
    from stepsaver.api.listing import policies, rules
    from stepsaver.api.model import Model, Piece, load
    from stepsaver.engine.score import Score

__version__ = "0.1.0"  # written only here; pyproject.toml reads it
__all__ = [
    "Answer",
    "ComparedConfig",
    "Comparison",
    "Model",
    "Piece",
    "Score",
    "UsageError",
    "compare",
    "load",
    "policies",
    "rules",
]

_WHERE = {  # imported on first use: torch takes seconds to import, and `stepsaver --help` does not need it
    "Answer": "stepsaver.api.answer",
    "ComparedConfig": "stepsaver.api.compare",
    "Comparison": "stepsaver.api.compare",
    "Model": "stepsaver.api.model",
    "Piece": "stepsaver.api.model",
    "Score": "stepsaver.engine.score",
    "compare": "stepsaver.api.compare",
    "load": "stepsaver.api.model",
    "policies": "stepsaver.api.listing",
    "rules": "stepsaver.api.listing",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__", "__all__", "__file__", "__name__", "__path__"]
