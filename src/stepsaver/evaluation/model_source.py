"""From the name of a model to a folder: `embedded`, a local folder, or a hub id. Nothing else of the hub is used."""

import os
import re
from pathlib import Path

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.config import read_json
from stepsaver.evaluation.embedded import MODEL_FOLDER

EMBEDDED = "embedded"
MASK_TOKENS = ("|<MASK>|", "<|mask|>")
# Weights, configurations, tokenizers and chat templates. Never code, and never pickles.
FILE_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str, *, revision: str | None = None) -> Path:
    """The folder of a model. A hub id is downloaded once into the hub's own cache."""
    if name == EMBEDDED:
        if not (MODEL_FOLDER / "config.json").exists():
            raise UsageError(f"the embedded model is missing from {MODEL_FOLDER}")
        return MODEL_FOLDER
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(name) or name.startswith((".", "/")):
        raise UsageError(f"no model {name!r}: expected {EMBEDDED!r}, a folder, or a hub id such as owner/name")
    return _download(name, revision)


def hub_revision(folder: Path) -> str | None:
    """The commit of a checkpoint that lies in the hub's cache, which names its folder; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def _download(name: str, revision: str | None) -> Path:
    """The hub's own client finds `HF_TOKEN` or the stored login by itself, so no token passes through here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILE_PATTERNS)))
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
    """The id of the mask token by the tokenizer's files, for checkpoints whose `config.json` does not name it."""
    ids = _added_tokens(folder)
    return next((ids[token] for token in (*MASK_TOKENS, _named_mask(folder)) if token in ids), None)


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens beyond the base vocabulary, from each of the places where a tokenizer may keep them."""
    found: dict[str, int] = {}
    for token, index in read_json(folder / "added_tokens.json").items():
        found[token] = int(index)
    for entry in read_json(folder / "tokenizer.json").get("added_tokens", []):
        found[entry["content"]] = int(entry["id"])
    for index, entry in read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        found[entry["content"]] = int(index)
    return found


def _named_mask(folder: Path) -> str:
    """What the tokenizer's configuration calls its mask token, if it has one."""
    named = read_json(folder / "tokenizer_config.json").get("mask_token") or ""
    return named["content"] if isinstance(named, dict) else named
