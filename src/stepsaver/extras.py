"""The package's extras: what decoding does not need is installed only if it is wanted."""

from collections.abc import Iterator
from contextlib import contextmanager

from stepsaver.engine.errors import UsageError

# By the name of a module, the extra of pyproject.toml that installs it.
PARTS = {
    **dict.fromkeys(("datasets", "lm_eval", "pyarrow", "pydantic", "rich", "scipy", "tqdm", "yaml"), "bench"),
    **dict.fromkeys(("matplotlib", "pandas", "plotly"), "report"),
    "submitit": "slurm",
}


@contextmanager
def named_parts() -> Iterator[None]:
    """Answers a missing extra with one line that says how to install it. Any other missing module is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = missing_part(error.name or "")
        if problem is None:
            raise
        raise problem from None


def missing_part(module: str) -> UsageError | None:
    """Returns the error that says how to install a module; None if no extra has it."""
    name = module.partition(".")[0]
    part = PARTS.get(name)
    return UsageError(f"this needs {name}: pip install 'stepsaver[{part}]'") if part else None
