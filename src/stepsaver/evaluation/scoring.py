"""Runs log-likelihood requests on the engine: jobs in, records out, in the order in which they finish."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from stepsaver.engine.defaults import Estimator
from stepsaver.engine.engine import Engine
from stepsaver.engine.score import Score, ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.encoding import FittedPrompt
from stepsaver.evaluation.meter import Meter
from stepsaver.evaluation.records import RequestKey, RequestRecord


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
            yield job, _record(job, [])
    open_windows = Counter({job.position: len(job.windows) for job in jobs})
    found: dict[int, list[Score]] = defaultdict(list)
    for score in scores(asked, meter.trace):
        job = windows[score.index][0]
        found[job.position].append(score)
        open_windows[job.position] -= 1
        if not open_windows[job.position]:
            record = _record(job, found.pop(job.position))
            meter.count(tokens=record.tokens + score_stop * len(job.windows), prompt_tokens=record.prompt_tokens)
            yield job, record


def _record(job: ScoringJob, scores: list[Score]) -> RequestRecord:
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
