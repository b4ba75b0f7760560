"""Finds the folder of a model by its name: `embedded`, a local folder, or a hub id. Uses nothing else of the hub."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.config import TOKEN, read_json
from stepsaver.engine.models.fields import Entries, Field, Many, read_fields
from stepsaver.evaluation.embedded import MODEL_FOLDER

EMBEDDED = "embedded"
MASK_TOKENS = ("|<MASK>|", "<|mask|>")
# Weights, configurations, tokenizers and chat templates. Never code or pickles.
FILE_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str, *, revision: str | None = None, downloads: bool = True) -> Path:
    """The folder of a model. A hub id is downloaded once, into the hub's own cache, if `downloads` allows it."""
    if name == EMBEDDED:
        if not (MODEL_FOLDER / "config.json").exists():
            raise UsageError(f"the embedded model is missing from {MODEL_FOLDER}")
        return MODEL_FOLDER
    folder = Path(name).expanduser()
    try:
        if name and folder.is_dir():
            return folder
    except OSError as error:  # a name that no file system takes
        raise UsageError(f"no model {shown(name)}: {error.strerror}") from None
    if not HUB_ID.fullmatch(name) or name.startswith((".", "/")):
        raise UsageError(f"no model {shown(name)}: expected {EMBEDDED!r}, a folder, or a hub id such as owner/name")
    return _download(name, revision, downloads)


def hub_revision(folder: Path) -> str | None:
    """The commit of a checkpoint in the hub's cache, which is its folder's name; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def _download(name: str, revision: str | None, downloads: bool) -> Path:
    """Downloads with the hub's own client. It finds `HF_TOKEN` or the stored login itself, so we never see a token."""
    if find_spec("huggingface_hub") is None:  # it comes with tokenizers, unless somebody removed it
        raise UsageError(f"model {name} is on the hub: pip install huggingface_hub, or give a folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        patterns = list(FILE_PATTERNS)
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=not downloads))
    except GatedRepoError:
        reason = f"is gated: accept its terms at https://huggingface.co/{name}, then set HF_TOKEN or log in"
    except RevisionNotFoundError:
        reason = f"has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "is not on the hub, or is private: check the name, set HF_TOKEN or log in"
    except LocalEntryNotFoundError:
        reason = f"is not in the local cache and the hub is out of reach{_offline_note()}"
    except (HfHubHTTPError, OSError) as error:
        reason = f"cannot be downloaded ({type(error).__name__}){_offline_note()}"
    raise UsageError(f"model {name} {reason}")


def _offline_note() -> str:
    return " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""


def read_mask_id(folder: Path) -> int | None:
    """The id of the mask token from the tokenizer's files, for checkpoints whose `config.json` does not name it."""
    configuration = _checked(folder / "tokenizer_config.json", {"added_tokens_decoder": Entries()})
    ids = _added_tokens(folder, configuration.get("added_tokens_decoder", {}))
    named = configuration.get("mask_token")
    if isinstance(named, dict):
        named = named.get("content")
    known = (*MASK_TOKENS, *([named] if isinstance(named, str) else []))
    return next((ids[token] for token in known if token in ids), None)


def _added_tokens(folder: Path, decoder: dict[str, Any]) -> dict[str, int]:
    """Tokens outside the base vocabulary, from all files in which a tokenizer may keep them."""
    listed = _checked(folder / "tokenizer.json", {"added_tokens": Many(Entries())}).get("added_tokens", [])
    pairs: list[tuple[Any, Any]] = list(read_json(folder / "added_tokens.json").items())
    pairs += [(entry.get("content"), entry.get("id")) for entry in listed]
    for index, entry in decoder.items():
        is_number = index.isascii() and index.isdecimal() and len(index) < 10
        pairs.append((entry.get("content") if isinstance(entry, dict) else None, int(index) if is_number else index))
    for token, index in pairs:
        if not isinstance(token, str) or not TOKEN.holds(index):
            raise UsageError(f"{folder}: added token {shown(token)} has the id {shown(index)}; expected {TOKEN.means}")
    return dict(pairs)


def _checked(path: Path, table: dict[str, Field]) -> dict[str, Any]:
    """A file's fields that are in the table, checked."""
    content = read_json(path)
    try:
        read_fields(content, table)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return {name: value for name, value in content.items() if value is not None}
