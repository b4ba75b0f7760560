"""Checks a task's generation keywords. The harness passes them as a dictionary, with several spellings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.engine.sampling import Sampling

# The harness's own order of precedence.
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KEYS = frozenset({"until", "do_sample", "temperature", "top_p", "seed", *LIMIT_KEYS})


@dataclass(frozen=True)
class GenerationParameters:
    """Requests with equal parameters are decoded together."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


def read_parameters(
    keywords: Mapping[str, Any], *, default_new_tokens: int, token_limit: int | None = None
) -> GenerationParameters:
    """Greedy unless `do_sample` says otherwise. As in the harness, a temperature alone implies sampling.

    A `token_limit` replaces the task's limit. The default is used if the task has none.
    """
    unknown = keywords.keys() - KNOWN_KEYS
    if unknown:
        raise UsageError(
            f"generation keywords {', '.join(sorted(unknown))} are not supported; "
            f"allowed: {', '.join(sorted(KNOWN_KEYS))}"
        )
    until = keywords.get("until") or []
    strings = (until,) if isinstance(until, str) else tuple(until)
    limits = [limit for limit in (token_limit, *map(keywords.get, LIMIT_KEYS)) if limit is not None]
    given = keywords.get("temperature")
    samples = bool(keywords.get("do_sample", bool(given)))
    temperature = float(given) if given is not None else 1.0
    top_p = keywords.get("top_p")
    sampling = Sampling(
        temperature=temperature if samples else 0.0,
        top_p=float(top_p) if samples and top_p is not None else 1.0,
        seed=int(keywords.get("seed") or 0),
    )
    return GenerationParameters(strings, int(limits[0]) if limits else default_new_tokens, sampling)
