"""The entry point: takes a model, a policy, reuse rules and a batch size; turns prompts into finished samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from stepsaver.engine.batch import BatchContext, StepEvent
from stepsaver.engine.cache import DeltaCache, KeyValueCache
from stepsaver.engine.curve import Curve
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import DecodingSettings, Prompt, check_prompt, resolve_decoding
from stepsaver.engine.defaults import BATCH_SIZE, ESTIMATORS, Estimator
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.forward import Memory, Observe
from stepsaver.engine.generate import decode, iterations
from stepsaver.engine.machine import require_own_threads
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import (
    IN_ONE_FORWARD,
    Prepare,
    Score,
    ScoreRequest,
    forwards_of,
    merge_requests,
    run_once,
    scores_of,
    steps_of,
)
from stepsaver.engine.state import Finish, Request, request_key
from stepsaver.engine.trace import SampleStep, Trace


@dataclass(frozen=True)
class Completion:
    """A finished sample. `index` is that of its prompt, `ids` are the generated tokens including the stop token."""

    index: int
    ids: list[int]
    finish: Finish
    steps: list[SampleStep]
    confidences: list[float]  # how sure the model was of each token


@dataclass(frozen=True)
class Settled:
    """A sample being decoded: the generated tokens before its first masked position. They will not change any more."""

    index: int
    ids: list[int]
    finish: Finish | None  # None: more will come


class Engine:
    """Decodes prompts with one model and one configuration. Keeps no state between calls.

    `checked` proves before each step that nothing stale is read. `observe` sees every delta that is computed.
    `curve` says what a forward costs here. By it speculative decoding chooses the length of drafts, and `join=auto`
    whether commits share a forward.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        decoder: Decoder | None = None,
        batch_size: int = BATCH_SIZE,
        decoding: DecodingSettings | None = None,
        checked: bool = False,
        observe: Observe | None = None,
        curve: Curve | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch size {batch_size} is not positive")
        self.model = model
        self.decoder: Decoder = decoder or Denoise()
        self.batch_size = batch_size
        self.decoding = self.decoder.settled(decoding or resolve_decoding(model.config))
        self.checked = checked
        self.observe = observe
        self.curve = curve
        self.decoder.check(self.decoding, model.config.layers)

    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        trace: Trace | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        finished: Callable[[list[int]], bool] | None = None,
    ) -> Iterator[Completion]:
        """Yields finished samples as they finish.

        `on_step` is called for every denoising step of every sample. `finished` gets the tokens so far and may end the
        sample: after each block in block diffusion, after each token with the other decoders. `trace` gets a record per
        forward.
        """
        requests = self._requests(prompts, max_new_tokens)
        return self._decode(
            requests, sampling or Sampling(), trace if trace is not None else Trace(), on_step, finished
        )

    def stream(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        trace: Trace | None = None,
        finished: Callable[[list[int]], bool] | None = None,
    ) -> Iterator[Settled]:
        """Yields a sample each time more of its tokens have settled, and when it is finished."""
        requests = self._requests(prompts, max_new_tokens)
        return self._settle(requests, sampling or Sampling(), trace if trace is not None else Trace(), finished)

    def score(
        self,
        requests: Sequence[ScoreRequest],
        *,
        estimator: Estimator = "trajectory",
        score_stop: bool = False,
        trace: Trace | None = None,
    ) -> Iterator[Score]:
        """Yields the log-likelihood of each continuation after its context, as requests finish.

        `trajectory` scores the way text is written: by the decode loop with its policy and rules, or by one forward
        where text is autoregressive. `reference` and `autoregressive` are one forward, on which no rule can act.
        `reference` scores the first token only, `autoregressive` all tokens, by causal positions. `score_stop` appends
        the stop token.
        """
        estimator = self.check_estimator(estimator)
        checked = [self._score_request(index, each, score_stop) for index, each in enumerate(requests)]
        return self._score(checked, estimator, trace if trace is not None else Trace())

    def check_estimator(self, estimator: Estimator) -> Estimator:
        """The estimator that is run for this one. Refuses one that is unknown or that the decoder has no way to run."""
        if estimator not in ESTIMATORS:
            raise unknown_name("estimator", estimator, ESTIMATORS)
        return self.decoder.estimator(estimator, self.decoding)

    def _requests(self, prompts: Sequence[Prompt | Sequence[int]], max_new_tokens: int) -> list[Request]:
        return [self._request(index, prompt, max_new_tokens) for index, prompt in enumerate(prompts)]

    def _settle(
        self,
        requests: list[Request],
        sampling: Sampling,
        trace: Trace,
        finished: Callable[[list[int]], bool] | None,
    ) -> Iterator[Settled]:
        if not requests:
            return
        batch = self._batch(requests, trace, sampling=sampling, finished=finished)
        counts = [0] * len(requests)
        for samples in iterations(batch, requests, trace):
            for sample in samples:
                ids = sample.generated
                if len(ids) > counts[sample.index] or sample.ending is not None:
                    counts[sample.index] = len(ids)
                    yield Settled(sample.index, ids, sample.ending.finish if sample.ending else None)

    def _score(self, requests: list[ScoreRequest], estimator: Estimator, trace: Trace) -> Iterator[Score]:
        asked = [index for index, request in enumerate(requests) if request.continuation_ids]
        yield from (Score(i, 0.0, True, 0) for i, request in enumerate(requests) if not request.continuation_ids)
        if not asked:
            return
        scored = [requests[index] for index in asked]
        if estimator in IN_ONE_FORWARD:
            found = self._score_once(scored, IN_ONE_FORWARD[estimator], trace)
        else:
            found = self._score_by_trajectory(scored, trace)
        for score in found:
            trace.tokens_scored += len(requests[asked[score.index]].continuation_ids)
            yield replace(score, index=asked[score.index])

    def _score_by_trajectory(self, requests: list[ScoreRequest], trace: Trace) -> Iterator[Score]:
        merged = merge_requests(requests)
        decoding = replace(self.decoding, stop_ids=())  # a continuation is scored to its end, stop tokens or not
        batch = self._batch([each.request for each in merged], trace, decoding=decoding)
        for sample in decode(batch, [each.request for each in merged], trace):
            yield from scores_of(merged[sample.index], sample)

    def _score_once(self, requests: list[ScoreRequest], prepare: Prepare, trace: Trace) -> Iterator[Score]:
        longest = max(len(each.context_ids) + 2 * len(each.continuation_ids) + 1 for each in requests)
        slots = min(self.batch_size, len(requests))
        memory = self._memory(slots, longest)._replace(deltas=None)  # they have room for one block, not for a context
        trace.cache_bytes, trace.slots = memory.cache.bytes, slots
        forwards = forwards_of(requests, prepare, self.decoding)
        for start in range(0, len(forwards), self.batch_size):
            started = perf_counter()
            group = forwards[start : start + self.batch_size]
            steps = steps_of(group, self.decoding, self.model.config.layers)
            found = list(run_once(self.model, memory, steps, group, self.decoding.mask_id))
            trace.add_single_forward(perf_counter() - started, [step.plan for step in steps], start)
            yield from found

    def _score_request(self, index: int, request: ScoreRequest, score_stop: bool) -> ScoreRequest:
        continuation = request.continuation_ids
        if score_stop:
            if not self.decoding.stop_ids:
                raise UsageError("score_stop needs a stop token, and this model has none; set the stop id")
            continuation = (*continuation, self.decoding.stop_ids[0])
        where = f"request {index}"
        context = check_prompt(
            Prompt(request.context_ids), self.model.config, self.decoding, len(continuation), f"{where}, context"
        )
        if continuation:
            check_prompt(Prompt(continuation), self.model.config, self.decoding, 0, f"{where}, continuation")
        return ScoreRequest(context, continuation)

    def _decode(
        self,
        requests: list[Request],
        sampling: Sampling,
        trace: Trace,
        on_step: Callable[[StepEvent], None] | None,
        finished: Callable[[list[int]], bool] | None,
    ) -> Iterator[Completion]:
        if not requests:
            return
        batch = self._batch(requests, trace, sampling=sampling, on_step=on_step, finished=finished)
        for sample in decode(batch, requests, trace):
            assert sample.ending is not None
            ids, first = sample.generated, len(sample.request.prompt)
            sure = [sample.confidences[position] for position in range(first, first + len(ids))]
            yield Completion(sample.index, ids, sample.ending.finish, sample.steps, sure)

    def _batch(
        self,
        requests: list[Request],
        trace: Trace,
        *,
        decoding: DecodingSettings | None = None,
        sampling: Sampling | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
        finished: Callable[[list[int]], bool] | None = None,
    ) -> BatchContext:
        slots = min(self.batch_size, len(requests))
        memory = self._memory(
            slots, max(request.end for request in requests) + self.decoder.further_places(self.decoding)
        )
        trace.slots = slots
        trace.cache_bytes = memory.cache.bytes + (memory.deltas.bytes if memory.deltas else 0)
        return BatchContext(
            self.model,
            memory,
            self.decoder,
            decoding or self.decoding,
            sampling or Sampling(),
            slots,
            self.curve,
            checked=self.checked,
            on_step=on_step,
            finished=finished,
        )

    def _memory(self, slots: int, positions: int) -> Memory:
        """Caches for `slots` samples of `positions` positions, rounded up to whole blocks."""
        require_own_threads()
        model, size = self.model, self.decoding.block_size
        if self.decoding.prediction.has_causal_context:  # the last block starts anywhere, and may end that much later
            positions += size - 1
        capacity = (positions + size - 1) // size * size
        cache = KeyValueCache(
            model.config,
            slots=slots,
            capacity=capacity,
            dtype=model.dtype,
            device=model.device,
            backend=model.backend,
        )
        layers = model.config.layers
        probed = frozenset[int]().union(*(rule.probe_layers(layers) for rule in self.decoder.rules))
        kept = probed.union(*(rule.delta_layers(layers) for rule in self.decoder.rules))
        deltas = None
        if kept:
            deltas = DeltaCache(
                model.config, layers=kept, slots=slots, block_size=size, dtype=model.dtype, device=model.device
            )
        return Memory(cache, deltas, model.rotations(capacity), probed, self.observe)

    def _request(self, index: int, prompt: Prompt | Sequence[int], max_new_tokens: int) -> Request:
        given = prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))
        limit = max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
        ids = check_prompt(given, self.model.config, self.decoding, limit, f"prompt {index}")
        return Request(ids, limit, request_key(ids, given.identity, given.number))
