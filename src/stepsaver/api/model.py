"""A loaded model, which generates texts from prompts and scores texts by their log-likelihood."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

from stepsaver.api.answer import Answer
from stepsaver.api.prompts import (
    Ids,
    Text,
    is_conversation,
    known_ids,
    listed_items,
    listed_prompts,
    stop_strings,
    token_ids,
)
from stepsaver.engine.arguments import converted, converted_all
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoding_settings import DecodingSettings, Prompt
from stepsaver.engine.defaults import BATCH_SIZE, COMPILE, NEW_TOKENS, WEIGHTS, Compile, Estimator, Join, Weights
from stepsaver.engine.engine import Completion, Engine, Settled
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.rules.rule import Rule, chosen_rules
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.saved import positions_computed
from stepsaver.engine.score import Score, ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.encoding import checked_text, context_text, encode_messages, encode_pair, encode_prompt
from stepsaver.evaluation.growing_text import SettlingText, StopStrings
from stepsaver.evaluation.open_model import OpenModel, open_model
from stepsaver.evaluation.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch

    from stepsaver.report.trace_data import TraceRecorder

logger = logging.getLogger(__name__)

Rules = str | Rule | Sequence[str | Rule]


class GenerateOptions(TypedDict, total=False):
    """What `Model.generate` and `Model.stream` take beside prompts. Defaults are in the signature of `generate`."""

    decode: str | Decoder | None
    rules: Rules
    policy: str | Policy | None
    threshold: float | None
    recipe: str | os.PathLike[str] | None
    batch_size: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    stop: str | Sequence[str]
    chat: bool


class Piece(NamedTuple):
    """What has settled of an answer since its last piece. Tokens settle up to the first row that is still masked."""

    prompt: int  # the index of the prompt that it answers
    text: str
    ids: list[int]
    is_last: bool  # the answer is complete

    def __str__(self) -> str:
        return self.text


class Model:
    """A model with its weights, made by `stepsaver.load`. Every call chooses its own rules and policy."""

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened
        self.network = opened.load()

    def __repr__(self) -> str:
        dtype = str(self.opened.dtype).removeprefix("torch.")
        return f"<stepsaver.Model {self.name}: {self.opened.config.architecture}, {dtype} on {self.opened.device}>"

    @property
    def name(self) -> str:
        """The model's name as it was given to `load`."""
        return self.opened.name

    @property
    def folder(self) -> Path:
        """The folder that its files are in."""
        return self.opened.folder

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, with nothing added."""
        return self.tokenizer.encode(checked_text(converted("text", text), "the text"))

    def decode(self, ids: Ids) -> str:
        """Returns the text of token ids, without special tokens."""
        return self.tokenizer.decode(known_ids(ids, self.opened.config.vocab))

    @property
    def device(self) -> "torch.device":
        return self.opened.device

    @property
    def dtype(self) -> "torch.dtype":
        return self.opened.dtype

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.opened.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str | Ids, *, details: Literal[True], n: None = None, **options: Unpack[GenerateOptions]
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        *,
        details: Literal[True],
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Answer]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str | Ids, *, n: None = None, **options: Unpack[GenerateOptions]
    ) -> str: ...

    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Ids], *, n: None = None, **options: Unpack[GenerateOptions]
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        prompts: Text | Sequence[Text],
        *,
        n: int | None = None,
        ids: bool = False,
        details: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        prompts: Text | Sequence[Text],
        *,
        n: int | None = None,
        ids: bool = False,
        details: bool = False,
        decode: str | Decoder | None = None,
        rules: Rules = (),
        policy: str | Policy | None = None,
        threshold: float | None = None,
        recipe: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        max_new_tokens: int = NEW_TOKENS,
        temperature: float = Sampling.temperature,
        top_p: float = Sampling.top_p,
        top_k: int | None = Sampling.top_k,
        seed: int = Sampling.seed,
        stop: str | Sequence[str] = (),
        chat: bool = True,
    ) -> Any:
        """Returns the answer to a prompt; to a list of prompts, the list of their answers, in their order.

        A prompt is a text, a list of messages (`{"role": "user", "content": "..."}`) or its token ids. The model's chat
        template, if it has one, turns a text into a user's message, unless `chat` is False. If the last message is the
        assistant's, the answer goes on with it.
        An answer is a text; with `details` an `Answer`, which has the text, its ids and what was computed; with `ids`
        its token ids, including the stop token, for which a model needs no tokenizer. With `n` each prompt has a list
        of so many answers.
        `decode` is a decoder, as `--decode` names it: `block` (the usual one), `speculative` or `autoregressive`. For
        `block`, `rules` say which work is left out, `policy` (or `threshold` alone) which positions a step unmasks:
        texts such as `trim:level=changed`, or objects; the policy is the model's own unless it is given. A `recipe`,
        the file that `stepsaver tune` writes, sets all of these, and the batch size unless it is given.
        At temperature 0 decoding is greedy. Otherwise tokens are drawn from the `top_k` likeliest of them and, of
        these, from the likeliest with a probability of `top_p` together. Draws depend on seed, prompt and number within
        `n`, never on the batch, so equal prompts have equal answers. An answer ends before the first `stop` string.
        """
        n, ids, details = converted_all("n", n=n, ids=ids, details=details).values()
        asked = self._ask(
            prompts, n or 1, ids, decode, rules, policy, threshold, recipe, batch_size, max_new_tokens, temperature,
            top_p, top_k, seed, stop, chat,
        )  # fmt: skip
        found: list[Any] = list(self._details(asked) if details else map(asked.answer, self._completions(asked)))
        answers = found if n is None else [found[start : start + n] for start in range(0, len(found), n)]
        return answers[0] if asked.is_single else answers

    def stream(
        self, prompts: Text | Sequence[Text], *, ids: bool = False, **options: Unpack[GenerateOptions]
    ) -> "Iterator[Piece]":
        """Yields pieces of the answers as they settle, the prompts of a batch in turn. Takes what `generate` takes.

        A token has settled when no position before it is masked: nothing changes it any more. A piece's text never ends
        within a character; with `ids` it is empty. Wrong arguments raise at the call itself.
        """
        asked = self._ask(prompts, 1, converted("ids", ids), **options)
        settled = asked.engine.stream(asked.prompts, **asked.settings)
        return self._pieces(settled, asked)

    def _ask(
        self,
        prompts: Text | Sequence[Text],
        n: int,
        ids: bool,
        decode: str | Decoder | None = None,
        rules: Rules = (),
        policy: str | Policy | None = None,
        threshold: float | None = None,
        recipe: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        max_new_tokens: int = NEW_TOKENS,
        temperature: float = Sampling.temperature,
        top_p: float = Sampling.top_p,
        top_k: int | None = Sampling.top_k,
        seed: int = Sampling.seed,
        stop: str | Sequence[str] = (),
        chat: bool = True,
    ) -> "_Asked":
        engine = self._engine(decode, rules, policy, threshold, batch_size, recipe)
        drawn = converted_all("top_k", temperature=temperature, top_p=top_p, seed=seed, top_k=top_k)
        sampling, limit, chat = Sampling(**drawn), converted("max_new_tokens", max_new_tokens), converted("chat", chat)
        if n > 1 and sampling.is_greedy:
            raise UsageError(f"n {n} needs a temperature: at temperature 0 all answers to a prompt are the same")
        listed, is_single = listed_prompts(prompts)
        encoded = [self._prompt(each, f"prompt {index}", chat) for index, each in enumerate(listed)]
        strings = stop_strings(stop)
        stops = StopStrings(self.tokenizer, strings, block_size=self.opened.decoding.block_size) if strings else None
        return _Asked(
            engine,
            [replace(prompt, number=number) for prompt in encoded for number in range(n)],
            {"max_new_tokens": limit, "sampling": sampling, "finished": stops.are_reached if stops else None},
            stops,
            None if ids else self.tokenizer,
            is_single,
        )

    def _completions(self, asked: "_Asked", **watching: Any) -> Iterator[Completion]:
        """Yields completions in the prompts' order; those that finish early wait."""
        early: dict[int, Completion] = {}
        following = 0
        with self.opened.blamed():
            for completion in asked.engine.generate(asked.prompts, **asked.settings, **watching):
                early[completion.index] = asked.stops.cut(completion) if asked.stops else completion
                while following in early:
                    yield early.pop(following)
                    following += 1

    def _details(self, asked: "_Asked") -> Iterator[Answer]:
        from stepsaver.report.trace_data import TraceRecorder

        trace, recorder = Trace(), TraceRecorder(asked.engine)
        found = list(self._completions(asked, trace=trace, on_step=recorder))
        for each in found:
            seconds = [
                record.seconds
                for record in trace.records
                if any(entry.sample == each.index and entry.rows for entry in record.entries)
            ]
            yield Answer(
                asked.text(each) if asked.tokenizer else "",
                each.ids,
                each.finish,
                len(seconds),
                positions_computed(each.steps, self.opened.config.layers),
                recorder.saved.of(each.index, each.steps),
                sum(seconds),
                each.confidences,
                partial(self._page, asked, each, recorder),
            )

    def _page(self, asked: "_Asked", completion: Completion, recorder: "TraceRecorder") -> str:
        from stepsaver.report.html_pages import trace_page
        from stepsaver.report.trace_data import trace_document

        prompt = [asked.prompts[completion.index].ids]
        text = asked.tokenizer.token_text if asked.tokenizer else "{} ".format
        runs = recorder.runs(prompt, [completion])
        return trace_page(trace_document(self.name, prompt, [asked.engine], [runs], text))

    def score(
        self,
        pairs: Sequence[tuple[Text, str | Ids]],
        *,
        decode: str | Decoder | None = None,
        rules: Rules = (),
        policy: str | Policy | None = None,
        threshold: float | None = None,
        recipe: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        estimator: Estimator = "trajectory",
        score_stop: bool = False,
        chat: bool = False,
    ) -> list[Score]:
        """Returns the log-likelihood of each continuation after its context, in the order of the pairs.

        A pair is two texts or two lists of token ids; nothing is added to them, not even a chat template. With `chat`
        the context is a user's message, and the continuation its answer; a context may also be a list of messages,
        which is a conversation with or without `chat`. The estimator
        `trajectory` scores with the loop that generates, its rules and its policy; `reference` and `autoregressive`
        take one forward. `score_stop` appends the stop token to every continuation.
        """
        estimator, score_stop, chat = converted_all(estimator=estimator, score_stop=score_stop, chat=chat).values()
        engine = self._engine(decode, rules, policy, threshold, batch_size, recipe)
        listed = listed_items(pairs, "pairs")
        requests = [self._request(index, *_pair(index, each), chat) for index, each in enumerate(listed)]
        with self.opened.blamed():
            found = engine.score(requests, estimator=estimator, score_stop=score_stop)
            return sorted(found, key=lambda each: each.index)

    def _engine(
        self,
        decode: str | Decoder | None,
        rules: Rules,
        policy: str | Policy | None,
        threshold: float | None,
        batch_size: int | None,
        recipe: str | os.PathLike[str] | None,
    ) -> Engine:
        threshold, batch_size = converted_all(
            "threshold", "batch_size", threshold=threshold, batch_size=batch_size
        ).values()
        if recipe is not None:
            if chosen_rules(rules) or any(each is not None for each in (decode, policy, threshold)):
                raise UsageError("a recipe settles decoder, rules, policy and threshold; leave them out")
            return self._tuned_engine(recipe_path(recipe), batch_size)
        return Engine(
            self.network,
            decoder=self.opened.decoder(decode, policy=policy, threshold=threshold, rules=rules),
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            decoding=self.opened.decoding,
        )

    def _tuned_engine(self, path: Path, batch_size: int | None) -> Engine:
        """Returns the recipe's engine. Logs one warning if model, dtype, device or batch size are not as measured."""
        from stepsaver.evaluation.recipe import read_recipe  # a recipe's file needs more packages than decoding does

        recipe = read_recipe(path)
        size = recipe.batch_size if batch_size is None else batch_size
        dtype = str(self.opened.dtype).removeprefix("torch.")
        said = recipe.differences(model=self.name, dtype=dtype, device=self.opened.device.type, batch_size=size)
        if said:
            logger.warning(said)
        rows = recipe.sub_block_size or self.opened.decoding.sub_block_size
        if self.opened.decoding.block_size % rows:
            raise UsageError(f"sub-block size {rows} does not divide the block size {self.opened.decoding.block_size}")
        decoding = replace(self.opened.decoding, sub_block_size=rows, join=recipe.join)
        return Engine(self.network, decoder=recipe.decoder(), batch_size=size, decoding=decoding)

    def _prompt(self, given: Any, where: str, chat: bool) -> Prompt:
        if is_conversation(given):
            return Prompt(encode_messages(self.tokenizer, given, where))
        if not isinstance(given, str):
            return Prompt(token_ids(given, where))
        return Prompt(encode_prompt(self.tokenizer, checked_text(given, where), chat=chat))

    def _request(self, index: int, context: Any, continuation: Any, chat: bool) -> ScoreRequest:
        where = f"pair {index}"
        if not isinstance(continuation, str) and not isinstance(context, str) and not is_conversation(context):
            return ScoreRequest(token_ids(context, where), token_ids(continuation, where))
        if not isinstance(continuation, str) or not (isinstance(context, str) or is_conversation(context)):
            raise UsageError(f"{where} is a text and a list of token ids; expected two of one kind")
        context = context_text(self.tokenizer, context, where, chat=chat)
        checked_text(context + continuation, where)
        return ScoreRequest(*encode_pair(self.tokenizer, context, continuation))

    def _pieces(self, found: Iterator[Settled], asked: "_Asked") -> Iterator[Piece]:
        texts = [SettlingText(asked.tokenizer, asked.stops) for _ in asked.prompts] if asked.tokenizer else []
        counts = [0] * len(asked.prompts)
        with self.opened.blamed():
            for settled in found:
                index, is_last = settled.index, settled.finish is not None
                text = texts[index].settle(settled.ids, is_last=is_last) if texts else ""
                ids = asked.stops.ids(settled.ids) if asked.stops else settled.ids
                new = ids[counts[index] :]
                counts[index] = len(ids)
                if new or is_last:
                    yield Piece(index, text, new, is_last)


class _Asked(NamedTuple):
    """What a call asks for, checked."""

    engine: Engine
    prompts: list[Prompt]
    settings: dict[str, Any]  # of `Engine.generate` and `Engine.stream`
    stops: StopStrings | None
    tokenizer: TextTokenizer | None  # None: answers are token ids
    is_single: bool  # one prompt, which is answered alone

    def answer(self, completion: Completion) -> str | list[int]:
        return completion.ids if self.tokenizer is None else self.text(completion)

    def text(self, completion: Completion) -> str:
        assert self.tokenizer is not None, "answers are token ids"
        return self.stops.text(completion.ids) if self.stops else self.tokenizer.decode(completion.ids)


def load(
    name: str | os.PathLike[str] = "embedded",
    *,
    revision: str | None = None,
    device: "str | torch.device" = "auto",
    dtype: "str | torch.dtype" = "auto",
    weights: Weights = WEIGHTS,
    compile: Compile = COMPILE,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    mask_id: int | None = None,
    stop_ids: Sequence[int] | None = None,
    prefix_cache: bool = DecodingSettings.prefix_cache,
    block_cache: bool = DecodingSettings.block_cache,
    join: Join = "auto",
) -> Model:
    """Loads a model: a folder, a hub id such as `Efficient-Large-Model/Fast_dLLM_v2_7B`, or the `embedded` one.

    Device and dtype are chosen automatically unless they are given. Sizes and token ids that are None come from the
    checkpoint or its architecture; `block_size` and `mask_id` have to be given if no file of the checkpoint has them.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"model {shown(name)} is neither a folder, a hub id nor `embedded`")
    chosen = converted_all(
        "revision",
        "block_size",
        "sub_block_size",
        "mask_id",
        revision=revision,
        device=_plain_name(device),
        dtype=_plain_name(dtype),
        weights=weights,
        compile=compile,
        block_size=block_size,
        sub_block_size=sub_block_size,
        mask_id=mask_id,
        prefix_cache=prefix_cache,
        block_cache=block_cache,
        join=join,
    )
    stops = None if stop_ids is None else token_ids(stop_ids, "stop_ids")
    opened = open_model(os.fspath(name), stop_ids=stops, **chosen)
    if said := opened.differences():
        logger.warning(said)
    return Model(opened)


def recipe_path(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"recipe {shown(given)} is not the path of a file")
    return Path(given)


def _plain_name(value: object) -> object:
    """A device or dtype of torch as text."""
    is_of_torch = type(value).__module__ == "torch" and type(value).__name__ in ("device", "dtype")
    return str(value).removeprefix("torch.") if is_of_torch else value


def _pair(index: int, given: tuple[Text, Text]) -> tuple[Text, Text]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UsageError(f"pair {index}: {shown(given)} is not a context and its continuation")
    return given
