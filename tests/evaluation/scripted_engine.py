"""An engine that answers by a script instead of a model, so that what is around it can be checked exactly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from stepsaver.engine.engine import Completion, Prompt
from stepsaver.engine.plan import prefill_plan
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import Score, ScoreRequest
from stepsaver.engine.trace import ForwardRecord, LayersRun, Trace, sample_step
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.byte_tokenizer import END_ID

BLOCK = 8


@dataclass
class ScriptedEngine:
    """`write` maps a prompt's text to its answer; `weigh` a context and a continuation to a log-likelihood.

    Samples finish in reverse order, in blocks of eight tokens, as a real engine may finish them.
    """

    tokenizer: TextTokenizer
    write: Callable[[str], str] = lambda prompt: ""
    weigh: Callable[[str, str], float] = lambda context, continuation: 0.0
    max_positions: int = 4096
    bos_id: int | None = END_ID
    batch_size: int = 2
    prompts: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decoding = SimpleNamespace(block_size=BLOCK, stop_ids=(END_ID,), bos_id=self.bos_id)
        self.model = SimpleNamespace(config=SimpleNamespace(max_positions=self.max_positions))

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        trace: Trace,
        finished: Callable[[list[int]], bool],
    ) -> Iterator[Completion]:
        self.limits.append(max_new_tokens)
        for index, prompt in reversed(list(enumerate(prompts))):
            assert len(prompt.ids) + max_new_tokens <= self.max_positions
            text = self.tokenizer.decode(prompt.ids, keep_special=True)
            self.prompts.append(text)
            answer = [*self.tokenizer.encode(self.write(text)), END_ID]
            ids: list[int] = []
            while len(ids) < max_new_tokens and (not ids or ids[-1] != END_ID):
                ids = answer[: min(len(ids) + BLOCK, max_new_tokens)]
                if ids[-1] != END_ID and finished(ids):
                    break
            trace.records.append(_forward(index))
            trace.tokens_generated += len(ids)
            finish = "stop" if ids[-1] == END_ID else "length"
            yield Completion(index, ids, finish, list(trace.records[-1].entries), [0.5] * len(ids))

    def score(
        self, requests: Sequence[ScoreRequest], *, estimator: str, score_stop: bool, trace: Trace
    ) -> Iterator[Score]:
        for index, request in reversed(list(enumerate(requests))):
            assert len(request.context_ids) + len(request.continuation_ids) <= self.max_positions
            context = self.tokenizer.decode(request.context_ids, keep_special=True)
            continuation = self.tokenizer.decode(request.continuation_ids, keep_special=True)
            value = self.weigh(context, continuation)
            trace.records.append(_forward(index))
            yield Score(index, value, is_greedy=value > -1.0, steps=len(request.continuation_ids))


def _forward(index: int) -> ForwardRecord:
    plan = prefill_plan(BLOCK, reads_last=True, layers=1)
    entry = sample_step(index, plan, step=0, context=BLOCK, unmasked=1, recomputed_context=0)
    return ForwardRecord(0.5, 0.5, LayersRun(1, 1, 1), (entry,), 0)
