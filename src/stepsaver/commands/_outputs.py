"""Tries where a command will write before the work starts, so that nothing is computed that cannot be written."""

from pathlib import Path
from tempfile import TemporaryFile

from stepsaver.engine.errors import UsageError


def check_output_file(option: str, path: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Raises if a file cannot be written, or if its name has none of the endings. Leaves nothing new there."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path}: the name ends in none of {', '.join(endings)}")
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _refused(option, path, error) from None


def check_output_folder(option: str, path: Path | None) -> None:
    """Makes the folder, if it is not there. Raises if nothing can be written in it."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise _refused(option, path, error) from None


def _refused(option: str, path: Path, error: OSError | ValueError) -> UsageError:
    why = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{option} {path}: no file can be written there ({why})")
