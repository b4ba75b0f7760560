"""Runs requests on the engine: jobs in, records out, in the order in which they finish."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from stepsaver.engine.defaults import Estimator
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import Score, ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.encoding import FittedPrompt
from stepsaver.evaluation.growing_text import StopStrings
from stepsaver.evaluation.records import InferencePath, RequestKey, RequestRecord, count_denoising_steps
from stepsaver.evaluation.tokenizer import TextTokenizer

WARM_UP_BLOCKS = 2
# The harness's own order of precedence.
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KEYS = frozenset({"until", "do_sample", "temperature", "top_p", "seed", *LIMIT_KEYS})


@dataclass
class Meter:
    """Adds up what one path's requests took; the seconds are the trace's. Requests with stored answers are not counted.

    `tokens` were generated, including stop tokens, or scored.
    """

    path: InferencePath
    trace: Trace
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    warm_up_seconds: float = 0.0

    def warm_up(self, run: Callable[[Trace], object]) -> None:
        """Runs one batch for a little, once, before timing starts: first forwards allocate, tune and compile."""
        if not self.warm_up_seconds:
            started = perf_counter()
            run(Trace())
            self.warm_up_seconds = perf_counter() - started

    def count(self, *, tokens: int, prompt_tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens


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
        record = _generated(engine, job, completion, stops)
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


def _generated(engine: Engine, job: GenerationJob, completion: Completion, stops: StopStrings) -> RequestRecord:
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


class Window(NamedTuple):
    context: FittedPrompt
    continuation: tuple[int, ...]


class ScoringJob(NamedTuple):
    """One request. It has several windows if its text is too long for the model, and none if it is empty."""

    position: int  # index in the caller's list
    key: RequestKey
    digest: str
    windows: tuple[Window, ...]


def score_answers(
    engine: Engine, jobs: list[ScoringJob], *, estimator: Estimator, score_stop: bool, meter: Meter
) -> Iterator[tuple[ScoringJob, RequestRecord]]:
    """Runs long contexts first. Requests with the same context stay together, so that the engine shares its prefill."""
    windows = [(job, window) for job in jobs for window in job.windows]
    windows.sort(key=lambda each: (-len(each[1].context.ids), each[1].context.ids, each[0].position))
    asked = [ScoreRequest(window.context.ids, window.continuation) for _, window in windows]

    def scores(requests: list[ScoreRequest], trace: Trace) -> Iterable[Score]:
        return engine.score(requests, estimator=estimator, score_stop=score_stop, trace=trace) if requests else ()

    meter.warm_up(lambda trace: list(scores(asked[: engine.batch_size], trace)))
    for job in jobs:
        if not job.windows:
            yield job, _scored(job, [])
    open_windows = Counter({job.position: len(job.windows) for job in jobs})
    found: dict[int, list[Score]] = defaultdict(list)
    for score in scores(asked, meter.trace):
        job = windows[score.index][0]
        found[job.position].append(score)
        open_windows[job.position] -= 1
        if not open_windows[job.position]:
            record = _scored(job, found.pop(job.position))
            meter.count(tokens=record.tokens + score_stop * len(job.windows), prompt_tokens=record.prompt_tokens)
            yield job, record


def _scored(job: ScoringJob, scores: list[Score]) -> RequestRecord:
    return RequestRecord(
        job.key,
        "scoring",
        job.digest,
        prompt_tokens=sum(len(window.context.ids) for window in job.windows),
        tokens_cut=sum(window.context.cut for window in job.windows),
        ids=tuple(token for window in job.windows for token in window.continuation),
        loglikelihood=sum(score.loglikelihood for score in scores),
        is_greedy=all(score.is_greedy for score in scores),
        denoising_steps=sum(score.steps for score in scores),
    )
