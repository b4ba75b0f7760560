"""Explains in plain words why a dataset of the hub is not available, and what to do. Never shows a token."""

import contextlib
import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from stepsaver.engine.errors import UsageError

PROBE_SECONDS = 3.0
GPQA_PAGE = "https://huggingface.co/datasets/Idavidrein/gpqa"


def dataset_problem(task: str, error: BaseException, *, is_gated: bool) -> UsageError | None:
    """A one-line error for an error of the hub or the network; None for any other error."""
    causes = _chain(error)
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    out_of_reach = names & {
        "ConnectError", "ConnectionError", "HTTPError", "LocalEntryNotFoundError", "OfflineModeIsEnabled",
    }  # fmt: skip
    absent = names & {"DatasetNotFoundError", "GatedRepoError", "RepositoryNotFoundError"}
    if not out_of_reach and not absent:
        return None
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    why = f"not in the local cache and the hub is out of reach{offline}" if out_of_reach else "not accessible"
    if is_gated or "GatedRepoError" in names or any("gated dataset" in str(cause) for cause in causes):
        page = GPQA_PAGE if is_gated else "its page on huggingface.co"
        return UsageError(
            f"task {task}: its dataset is gated and {why}; accept the terms at {page}, then set HF_TOKEN or run "
            "`hf auth login`, or give local files with --data-dir"
        )
    return UsageError(f"task {task}: its dataset is {why}; set HF_TOKEN if it is private, or use --data-dir")


@contextlib.contextmanager
def reachable_hub() -> Iterator[None]:
    """Treats the hub as offline while it is out of reach, so cached datasets load and others fail at once.

    The clients' own retries take half a minute per dataset, and MMLU has 57 of them.
    """
    if is_hub_reachable():
        yield
        return
    import datasets
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def is_hub_reachable() -> bool:
    """Whether the hub can be reached. Assumes so if there is a proxy, as only the clients themselves can tell then."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
        socket.create_connection((endpoint.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
