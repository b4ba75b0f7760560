"""Runs generation requests on the engine: jobs in, records out, in the order in which they finish."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.encoding import FittedPrompt
from stepsaver.evaluation.growing_text import StopStrings
from stepsaver.evaluation.meter import Meter
from stepsaver.evaluation.records import RequestKey, RequestRecord, count_denoising_steps
from stepsaver.evaluation.tokenizer import TextTokenizer

WARM_UP_BLOCKS = 2
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


class GenerationJob(NamedTuple):
    position: int  # index in the caller's list
    key: RequestKey
    digest: str
    prompt: FittedPrompt


def generate_answers(
    engine: Engine,
    tokenizer: TextTokenizer,
    jobs: list[GenerationJob],
    *,
    parameters: GenerationParameters,
    meter: Meter,
) -> Iterator[tuple[GenerationJob, RequestRecord]]:
    """Runs the longest prompts first: lengths in a batch are then similar, and a batch that is too big fails early."""
    jobs = sorted(jobs, key=lambda job: -len(job.prompt.ids))
    block = engine.decoding.block_size
    stops = StopStrings(tokenizer, parameters.until, block_size=block)
    prompts = [Prompt(job.prompt.ids, identity=str(job.key)) for job in jobs]
    beginning = replace(parameters, max_new_tokens=min(parameters.max_new_tokens, WARM_UP_BLOCKS * block))
    meter.warm_up(lambda trace: list(_complete(engine, prompts[: engine.batch_size], beginning, stops, trace)))
    for completion in _complete(engine, prompts, parameters, stops, meter.trace):
        job = jobs[completion.index]
        record = _record(engine, job, completion, stops)
        meter.count(tokens=record.tokens, prompt_tokens=record.prompt_tokens)
        yield job, record


def _complete(
    engine: Engine, prompts: list[Prompt], parameters: GenerationParameters, stops: StopStrings, trace: Trace
) -> Iterator[Completion]:
    return engine.generate(
        prompts,
        max_new_tokens=parameters.max_new_tokens,
        sampling=parameters.sampling,
        trace=trace,
        finished=stops.are_reached,
    )


def _record(engine: Engine, job: GenerationJob, completion: Completion, stops: StopStrings) -> RequestRecord:
    ids = tuple(completion.ids)
    has_stop_token = bool(ids) and ids[-1] in engine.decoding.stop_ids
    return RequestRecord(
        job.key,
        "generation",
        job.digest,
        prompt_tokens=len(job.prompt.ids),
        tokens_cut=job.prompt.cut,
        ids=ids,
        text=stops.text(ids[:-1] if has_stop_token else ids),
        finish=completion.finish,
        denoising_steps=count_denoising_steps(tuple(completion.steps)),
        steps=tuple(completion.steps),
    )
