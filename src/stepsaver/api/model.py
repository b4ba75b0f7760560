"""A loaded model, which generates texts from prompts and scores texts by their log-likelihood."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

from stepsaver.api.arguments import check_arguments
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoding_settings import DecodingSettings, Prompt
from stepsaver.engine.defaults import BATCH_SIZE, NEW_TOKENS, WEIGHTS, Estimator, Join, Weights
from stepsaver.engine.engine import Completion, Engine, Settled
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import Score, ScoreRequest
from stepsaver.evaluation.encoding import checked_text, encode_pair, encode_prompt
from stepsaver.evaluation.growing_text import SettlingText
from stepsaver.evaluation.open_model import OpenModel, open_model
from stepsaver.evaluation.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Text = str | Sequence[int]  # a text, or its token ids
Rules = str | Rule | Sequence[str | Rule]


class GenerateOptions(TypedDict, total=False):
    """What every overload of `Model.generate` takes, written once for all of them. Defaults are in its signature."""

    decode: str | Decoder | None
    rules: Rules
    policy: str | Policy | None
    threshold: float | None
    recipe: str | os.PathLike[str] | None
    batch_size: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
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
        check_arguments(text=text)
        return self.opened.tokenizer.encode(checked_text(text, "the text"))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return self.opened.tokenizer.decode(_known_ids(ids, self.opened.config.vocab))

    @overload
    def generate(
        self,
        prompts: str | Sequence[Text],
        *,
        ids: Literal[False] = False,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompts: str | Sequence[Text],
        *,
        ids: Literal[True],
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[list[int]]: ...

    @overload
    def generate(
        self,
        prompts: str | Sequence[Text],
        *,
        ids: bool = False,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: str | Sequence[Text],
        *,
        decode: str | Decoder | None = None,
        rules: Rules = (),
        policy: str | Policy | None = None,
        threshold: float | None = None,
        recipe: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        max_new_tokens: int = NEW_TOKENS,
        temperature: float = Sampling.temperature,
        top_p: float = Sampling.top_p,
        seed: int = Sampling.seed,
        chat: bool = True,
        ids: bool = False,
        stream: bool = False,
    ) -> Iterator[str] | Iterator[list[int]] | Iterator[Piece]:
        """Returns an iterator over the answers, in the prompts' order. Wrong arguments raise at the call itself.

        A prompt is a text or its token ids; a text alone is one prompt. The model's chat template, if it has one, turns
        a text into a user's message, unless `chat` is False.
        `decode` is a decoder, as `--decode` names it: `block` (the default), `speculative` or `autoregressive`. For
        `block`, `rules` say which work is left out, `policy` (or `threshold` alone) which rows a step reveals: texts
        such as `trim:level=changed`, or objects. A `recipe`, the file that `stepsaver tune` writes, sets all of these,
        and the batch size unless it is given. At temperature 0 decoding is greedy; otherwise the draws depend on seed
        and prompt, never on the batch, so equal prompts have equal answers.
        With `ids` the answers are token ids, including the stop token; a model without a tokenizer needs this.
        With `stream` the iterator yields pieces as they settle, the prompts of a batch in turn. A token has settled
        when no row before it is masked: nothing changes it any more. A piece's text never ends within a character; with
        `ids` it is empty.
        """
        check_arguments(threshold=threshold, batch_size=batch_size, max_new_tokens=max_new_tokens)
        check_arguments(temperature=temperature, top_p=top_p, seed=seed, chat=chat, ids=ids, stream=stream)
        engine = self._engine(decode, rules, policy, threshold, batch_size, recipe)
        sampling = Sampling(temperature, top_p, seed)
        listed = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
        encoded = [self._prompt(each, f"prompt {index}", chat) for index, each in enumerate(listed)]
        tokenizer = None if ids else self.opened.tokenizer
        if stream:
            settled = engine.stream(encoded, max_new_tokens=max_new_tokens, sampling=sampling)
            return self._pieces(settled, len(encoded), tokenizer)
        found = self._in_order(engine.generate(encoded, max_new_tokens=max_new_tokens, sampling=sampling))
        if tokenizer is None:
            return (each.ids for each in found)
        return (tokenizer.decode(each.ids) for each in found)

    def score(
        self,
        pairs: Sequence[tuple[Text, Text]],
        *,
        decode: str | Decoder | None = None,
        rules: Rules = (),
        policy: str | Policy | None = None,
        threshold: float | None = None,
        recipe: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        estimator: Estimator = "trajectory",
        score_stop: bool = False,
    ) -> list[Score]:
        """Returns the log-likelihood of each continuation after its context, in the order of the pairs.

        A pair is two texts or two lists of token ids; nothing is added to them, not even a chat template. The estimator
        `trajectory` scores with the loop that generates, its rules and its policy; `reference` and `autoregressive`
        take one forward. `score_stop` appends the stop token to every continuation.
        """
        check_arguments(threshold=threshold, batch_size=batch_size, estimator=estimator, score_stop=score_stop)
        engine = self._engine(decode, rules, policy, threshold, batch_size, recipe)
        listed = _listed(pairs, "pairs")
        requests = [self._request(index, *_pair(index, each)) for index, each in enumerate(listed)]
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
        if recipe is not None:
            if not isinstance(recipe, str | os.PathLike):
                raise UsageError(f"recipe {shown(recipe)} is not the path of a file")
            if rules or any(each is not None for each in (decode, policy, threshold)):
                raise UsageError("a recipe settles decoder, rules, policy and threshold; leave them out")
            return self._tuned_engine(Path(recipe), batch_size)
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

    def _prompt(self, given: Text, where: str, chat: bool) -> Prompt:
        if not isinstance(given, str):
            return Prompt(_token_ids(given, where))
        return Prompt(encode_prompt(self.opened.tokenizer, checked_text(given, where), chat=chat))

    def _request(self, index: int, context: Text, continuation: Text) -> ScoreRequest:
        where = f"pair {index}"
        if isinstance(context, str) and isinstance(continuation, str):
            checked_text(context + continuation, where)
            return ScoreRequest(*encode_pair(self.opened.tokenizer, context, continuation))
        if isinstance(context, str) or isinstance(continuation, str):
            raise UsageError(f"{where} is a text and a list of token ids; expected two of one kind")
        return ScoreRequest(_token_ids(context, where), _token_ids(continuation, where))

    def _in_order(self, found: Iterator[Completion]) -> Iterator[Completion]:
        """Yields completions in the prompts' order; those that finish early wait."""
        early: dict[int, Completion] = {}
        following = 0
        with self.opened.blamed():
            for completion in found:
                early[completion.index] = completion
                while following in early:
                    yield early.pop(following)
                    following += 1

    def _pieces(self, found: Iterator[Settled], prompts: int, tokenizer: TextTokenizer | None) -> Iterator[Piece]:
        texts = [SettlingText(tokenizer) for _ in range(prompts)] if tokenizer else []
        counts = [0] * prompts
        with self.opened.blamed():
            for settled in found:
                index, is_last = settled.index, settled.finish is not None
                text = texts[index].settle(settled.ids, is_last=is_last) if texts else ""
                new = settled.ids[counts[index] :]
                counts[index] = len(settled.ids)
                yield Piece(index, text, new, is_last)


def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    weights: Weights = WEIGHTS,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    mask_id: int | None = None,
    stop_ids: Sequence[int] | None = None,
    prefix_cache: bool = DecodingSettings.prefix_cache,
    block_cache: bool = DecodingSettings.block_cache,
    join: Join = "auto",
) -> Model:
    """Loads a model: a folder, a hub id such as `Efficient-Large-Model/Fast_dLLM_v2_7B`, or `embedded`.

    Device and dtype are chosen automatically unless they are given. Sizes and token ids that are None come from the
    checkpoint or its architecture; `block_size` and `mask_id` have to be given if no file of the checkpoint has them.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"model {shown(name)} is neither a folder, a hub id nor `embedded`")
    check_arguments(revision=revision, device=device, dtype=dtype, weights=weights, join=join)
    check_arguments(block_size=block_size, sub_block_size=sub_block_size, mask_id=mask_id)
    check_arguments(prefix_cache=prefix_cache, block_cache=block_cache)
    opened = open_model(
        os.fspath(name),
        revision=revision,
        device=device,
        dtype=dtype,
        weights=weights,
        block_size=block_size,
        sub_block_size=sub_block_size,
        mask_id=mask_id,
        stop_ids=None if stop_ids is None else _token_ids(stop_ids, "stop_ids"),
        prefix_cache=prefix_cache,
        block_cache=block_cache,
        join=join,
    )
    return Model(opened)


def _listed(given: Any, name: str) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{name}: {shown(given)} is not a list")
    return list(given)


def _known_ids(given: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    ids = _token_ids(given, "ids")
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise UsageError(f"id {shown(outside)} is outside the vocabulary of {vocabulary}")
    return ids


def _token_ids(given: Sequence[int], where: str) -> tuple[int, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    ids = tuple(given) if is_list else ()
    if not is_list or not all(type(token) is int for token in ids):
        raise UsageError(f"{where}: {shown(given)} is neither a text nor a list of token ids")
    return ids


def _pair(index: int, given: tuple[Text, Text]) -> tuple[Text, Text]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UsageError(f"pair {index}: {shown(given)} is not a context and its continuation")
    return given
