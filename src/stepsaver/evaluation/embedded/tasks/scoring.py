"""Python functions for the task files: where their documents are, and whether an instruction was followed."""

from pathlib import Path
from typing import Any

from stepsaver.evaluation.embedded.instructions import obeys


def documents(data_files: dict[str, str], **_: Any) -> Any:
    """The documents of each split. Paths are relative to this folder, wherever the evaluation is started.

    The harness also passes the task's metadata, which says nothing about documents.
    """
    from datasets import load_dataset  # only the harness needs it

    folder = Path(__file__).parent
    return load_dataset("json", data_files={split: str(folder / path) for split, path in data_files.items()})


def process_instruction(document: dict[str, Any], results: list[str]) -> dict[str, bool]:
    """Scores an instruction. `datasets` gives each document the arguments of all kinds; the checker reads its own."""
    return {"prompt_level_strict_acc": obeys(document["kind"], document["arguments"], results[0])}
