"""The optional parts of the package: what decoding does not need is installed when it is wanted."""

from collections.abc import Iterator
from contextlib import contextmanager

from stepsaver.engine.errors import UsageError

# By the name of a module, the part of pyproject.toml that brings it.
PARTS = {
    **dict.fromkeys(("datasets", "lm_eval", "pyarrow", "pydantic", "rich", "scipy", "tqdm", "yaml"), "bench"),
    **dict.fromkeys(("matplotlib", "pandas", "plotly"), "report"),
    "submitit": "slurm",
}


@contextmanager
def named_parts() -> Iterator[None]:
    """A part that is not installed is one line with the command that installs it. Any other module is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = missing_part(error.name or "")
        if problem is None:
            raise
        raise problem from None


def missing_part(module: str) -> UsageError | None:
    name = module.partition(".")[0]
    part = PARTS.get(name)
    return UsageError(f"this needs {name}: pip install 'stepsaver[{part}]'") if part else None
