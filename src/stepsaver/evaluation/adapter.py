"""The engine as a model of lm-eval: three methods, one decode loop for all of them.

Every answer goes to `on_record` at once, before anything is scored, so a scorer that fails later loses nothing. Known
answers are taken from `known`, so an interrupted run goes on where it stopped, and a failed scorer can be run again
without a forward.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from stepsaver.engine.defaults import NEW_TOKENS, Estimator
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.answering import (
    GenerationJob,
    GenerationParameters,
    Meter,
    ScoringJob,
    Window,
    generate_answers,
    read_parameters,
    score_answers,
)
from stepsaver.evaluation.encoding import FittedPrompt, encode_pair, fit_left
from stepsaver.evaluation.inert import ScoredLengths
from stepsaver.evaluation.records import (
    InferencePath,
    RequestKey,
    RequestRecord,
    request_digest,
    require_same_request,
)
from stepsaver.evaluation.tokenizer import Message, TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSettings:
    default_new_tokens: int = NEW_TOKENS  # if a task sets no limit
    token_limit: int | None = None  # replaces every task's own limit
    estimator: Estimator = "trajectory"
    score_stop: bool = False
    show_progress: bool | None = None  # None: on a terminal

    def of_answers(self, path: InferencePath) -> tuple[object, ...]:
        """What an answer depends on in addition to its request and the engine."""
        if path == "scoring":
            return self.estimator, self.score_stop
        return (self.default_new_tokens,) if self.token_limit is None else (self.default_new_tokens, self.token_limit)


class OpenRequest(NamedTuple):
    """A request that has to be run, and its index in the harness's list."""

    position: int
    key: RequestKey
    digest: str
    arguments: tuple[Any, ...]


class StepsaverLM(LM):
    """Answers the harness's requests with an engine and its tokenizer."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        *,
        settings: AdapterSettings | None = None,
        known: Iterable[RequestRecord] = (),
        on_record: Callable[[RequestRecord], None] | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.text_tokenizer = tokenizer
        self.settings = settings or AdapterSettings()
        self.is_complete = False  # whether the last call answered all its requests
        self.meters: dict[InferencePath, Meter] = {
            "generation": Meter("generation", Trace()),
            "scoring": Meter("scoring", Trace()),
        }
        if meter is not None:
            self.meters[meter.path] = meter
        self._known = {record.key: record for record in known}
        self._on_record = on_record or (lambda record: None)

    # What the harness needs in addition to answers.

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.text_tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        return self.text_tokenizer.chat_prompt(chat_history, opens_answer=add_generation_prompt)

    # The three methods.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers, open_requests = self._known_answers(requests, "generation")
        groups: dict[GenerationParameters, list[GenerationJob]] = defaultdict(list)
        for index, key, digest, (text, keywords) in open_requests:
            parameters = self._parameters(keywords)
            prompt = self._fit(self.text_tokenizer.encode(text), after=parameters.max_new_tokens, what=str(key))
            groups[parameters].append(GenerationJob(index, key, digest, prompt))
        self._notice_cuts([job.prompt for jobs in groups.values() for job in jobs])
        found = (
            each
            for parameters, jobs in groups.items()
            for each in generate_answers(
                self.engine, self.text_tokenizer, jobs, parameters=parameters, meter=self.meters["generation"]
            )
        )
        self._collect(answers, found, total=len(requests), verb="generating", hidden=disable_tqdm)
        return [_text(answers[index]) for index in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        records = self._score(requests, hidden=disable_tqdm)
        return [(_loglikelihood(record), bool(record.is_greedy)) for record in records]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        records = self._score(requests, hidden=disable_tqdm)
        return [_loglikelihood(record) for record in records]

    def check_requests(self, requests: Sequence[Instance]) -> None:
        """Refuses requests that leave no room for a prompt. Nothing is run, and only long continuations are encoded."""
        room = self.engine.model.config.max_positions
        for key, request in _keyed(requests):
            if request.request_type == "generate_until":
                self._fit((), after=self._parameters(request.args[1]).max_new_tokens, what=str(key))
            elif len(request.args[-1].encode(errors="replace")) + 1 >= room:
                deque(self._windows_of(request.request_type)(key, *request.args), maxlen=0)

    def scored_lengths(self, requests: list[Instance]) -> list[ScoredLengths]:
        """The lengths that log-likelihood requests have for the engine. Nothing is run."""
        windows = (
            window
            for key, request in _keyed(requests)
            for window in self._windows_of(request.request_type)(key, *request.args)
        )
        return [ScoredLengths(len(window.context.ids), len(window.continuation)) for window in windows]

    def _parameters(self, keywords: dict[str, Any]) -> GenerationParameters:
        settings = self.settings
        return read_parameters(
            keywords, default_new_tokens=settings.default_new_tokens, token_limit=settings.token_limit
        )

    def _windows_of(self, kind: str) -> Callable[..., Iterable[Window]]:
        return self._rolling_windows if kind == "loglikelihood_rolling" else self._pair_windows

    def _score(self, requests: list[Instance], *, hidden: bool) -> list[RequestRecord]:
        answers, open_requests = self._known_answers(requests, "scoring")
        is_rolling = any(request.request_type == "loglikelihood_rolling" for request in requests)
        jobs = [
            ScoringJob(index, key, digest, tuple(self._windows_of(requests[index].request_type)(key, *arguments)))
            for index, key, digest, arguments in open_requests
        ]
        self._notice_cuts([window.context for job in jobs for window in job.windows])
        found = score_answers(
            self.engine,
            jobs,
            estimator=self.settings.estimator,
            score_stop=self.settings.score_stop and not is_rolling,  # a text's windows have no stop token at the end
            meter=self.meters["scoring"],
        )
        self._collect(answers, found, total=len(requests), verb="scoring", hidden=hidden)
        return [answers[index] for index in range(len(requests))]

    def _pair_windows(self, key: RequestKey, context: str, continuation: str) -> Iterable[Window]:
        before, scored = encode_pair(self.text_tokenizer, context, continuation)
        after = len(scored) + self.settings.score_stop
        return [Window(self._fit(before, after=after, what=str(key)), scored)]

    def _rolling_windows(self, key: RequestKey, text: str) -> Iterable[Window]:
        """Scores every token once, in windows as long as the model can take. The first comes after one `bos` token."""
        bos = self.engine.decoding.bos_id
        if bos is None:
            raise UsageError(f"{key}: a text is scored after the bos token, and this model has none")
        windows = get_rolling_token_windows(
            self.text_tokenizer.encode(text),
            prefix_token=bos,
            max_seq_len=self.engine.model.config.max_positions - 1,
            context_len=1,
        )
        for context, continuation in map(make_disjoint_window, windows):
            yield Window(FittedPrompt(tuple(context), 0), tuple(continuation))

    # What they share.

    def _known_answers(
        self, requests: list[Instance], path: InferencePath
    ) -> tuple[dict[int, RequestRecord], list[OpenRequest]]:
        """Stored answers by index, and the requests that are left."""
        self.is_complete = False
        settings = self.settings.of_answers(path)
        answers: dict[int, RequestRecord] = {}
        open_requests = []
        for index, (key, request) in enumerate(_keyed(requests)):
            digest = request_digest((request.args, settings))
            record = self._known.get(key)
            if record is None:
                open_requests.append(OpenRequest(index, key, digest, request.args))
            else:
                require_same_request(record, digest)
                answers[index] = record
        return answers, open_requests

    def _collect(
        self,
        answers: dict[int, RequestRecord],
        found: Iterable[tuple[GenerationJob | ScoringJob, RequestRecord]],
        *,
        total: int,
        verb: str,
        hidden: bool,
    ) -> None:
        """Passes on each record when it is there, and stores it at its request's index."""
        shown = self.settings.show_progress
        disable = hidden or (None if shown is None else not shown)  # None: tqdm shows itself on a terminal only
        with tqdm(total=total, initial=len(answers), desc=verb, unit="request", disable=disable) as bar:
            for job, record in found:
                self._on_record(record)
                answers[job.position] = record
                bar.update()
        self.is_complete = True

    def _fit(self, ids: Sequence[int], *, after: int, what: str) -> FittedPrompt:
        return fit_left(tuple(ids), room=self.engine.model.config.max_positions, after=after, what=what)

    def _notice_cuts(self, prompts: Sequence[FittedPrompt]) -> None:
        cuts = [prompt.cut for prompt in prompts if prompt.cut]
        if cuts:
            logger.warning(
                "%d of %d prompts exceed the model's %d positions and were cut from the left, by up to %d tokens",
                len(cuts), len(prompts), self.engine.model.config.max_positions, max(cuts),
            )  # fmt: skip


def _keyed(requests: Sequence[Instance]) -> Iterator[tuple[RequestKey, Instance]]:
    """Each request with its key. Requests made by hand have no document; their index is used instead."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for index, request in enumerate(requests):
        document = index if request.doc_id is None else request.doc_id
        same = (request.task_name or "", document, request.idx)
        yield RequestKey(*same, repeat=seen[same]), request
        seen[same] += 1


def _text(record: RequestRecord) -> str:
    assert record.text is not None, f"{record.key} was not generated"
    return record.text


def _loglikelihood(record: RequestRecord) -> float:
    assert record.loglikelihood is not None, f"{record.key} was not scored"
    return record.loglikelihood
