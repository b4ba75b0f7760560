"""The adapter between the harness and an engine: order, limits, stop strings, cuts, records and speed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from stepsaver.engine.score import ScoreRequest
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.encoding import encode_pair
from stepsaver.evaluation.records import RequestRecord, record_from_json, record_to_json
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.conftest import sharpened, tiny_config
from tests.evaluation.byte_tokenizer import END_ID, MASK_ID, VOCABULARY
from tests.evaluation.scripted_engine import BLOCK, ScriptedEngine


def _generations(*requests: tuple[str, dict[str, Any]]) -> list[Instance]:
    return [
        Instance("generate_until", {}, arguments, 0, metadata=("task", place, 1))
        for place, arguments in enumerate(requests)
    ]


def _pairs(*requests: tuple[str, str]) -> list[Instance]:
    return [
        Instance("loglikelihood", {}, arguments, 0, metadata=("task", place, 1))
        for place, arguments in enumerate(requests)
    ]


def _scripted(tokenizer: TextTokenizer, **script: Any) -> StepsaverLM:
    return StepsaverLM(ScriptedEngine(tokenizer, **script), tokenizer)  # type: ignore[arg-type]


# Generation


def test_answers_come_in_the_order_of_the_requests(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, write=lambda prompt: prompt.upper())
    prompts = ["bb", "a", "dddd", "ccc", "a"]
    limits = [{"max_gen_toks": 50}, {"max_gen_toks": 60}, {"max_gen_toks": 50}, {}, {"max_gen_toks": 60}]
    answers = lm.generate_until(_generations(*zip(prompts, limits, strict=True)))
    assert answers == ["BB", "A", "DDDD", "CCC", "A"]


def test_longest_prompts_are_decoded_first_and_together(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, write=lambda prompt: "x")
    lm.generate_until(_generations(*((prompt, {}) for prompt in ("bb", "a", "dddd", "ccc"))))
    prompts = lm.engine.prompts  # type: ignore[attr-defined]
    warm_up, decoded = prompts[:-4], prompts[-4:]
    assert warm_up == ["ccc", "dddd"]  # one batch
    assert decoded == ["a", "bb", "ccc", "dddd"]  # the scripted engine finishes the last one first


@pytest.mark.parametrize(
    ("answer", "until", "expected"),
    [
        ("It is 7.\n\nQuestion: next", ["Question:"], "It is 7.\n\n"),
        ("1234567\n\nmore", ["\n\n"], "1234567"),  # split over two blocks
        ("abc日本語 and more", ["日本語"], "abc"),
        ("line\r\nnext", "\r\n", "line"),
        ("to its own end", ["absent"], "to its own end"),
        ("", ["x"], ""),
    ],
)
def test_stop_strings_end_an_answer(
    byte_tokenizer: TextTokenizer, answer: str, until: list[str] | str, expected: str
) -> None:
    lm = _scripted(byte_tokenizer, write=lambda prompt: answer)
    assert lm.generate_until(_generations(("prompt", {"until": until}))) == [expected]


def test_a_stop_string_saves_the_blocks_behind_it(byte_tokenizer: TextTokenizer) -> None:
    records: list[RequestRecord] = []
    engine = ScriptedEngine(byte_tokenizer, write=lambda prompt: "ab\n" + "x" * 200)
    lm = StepsaverLM(engine, byte_tokenizer, on_record=records.append)  # type: ignore[arg-type]
    assert lm.generate_until(_generations(("prompt", {"until": ["\n"]}))) == ["ab"]
    assert records[0].tokens == BLOCK


def test_token_limits(byte_tokenizer: TextTokenizer) -> None:
    lm = StepsaverLM(
        ScriptedEngine(byte_tokenizer, write=lambda prompt: "x" * 500),  # type: ignore[arg-type]
        byte_tokenizer,
        settings=AdapterSettings(default_new_tokens=20),
    )
    answers = lm.generate_until(_generations(("p", {"max_gen_toks": 5}), ("p", {}), ("p", {"max_new_tokens": 9})))
    assert [len(answer) for answer in answers] == [5, 20, 9]


def test_a_long_prompt_is_cut_from_the_left_with_a_notice(
    byte_tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lm = _scripted(byte_tokenizer, write=lambda prompt: prompt[-3:], max_positions=64)
    with caplog.at_level(logging.WARNING):
        answers = lm.generate_until(
            _generations(("x" * 100 + "end", {"max_gen_toks": 24}), ("short", {"max_gen_toks": 24}))
        )
    assert answers == ["end", "ort"]
    assert "1 of 2 prompts exceed the model's 64 positions" in caplog.text
    assert "by up to 63 tokens" in caplog.text
    with pytest.raises(UsageError, match="leave no room for a prompt"):
        lm.generate_until(_generations(("x", {"max_gen_toks": 64})))


def test_unknown_keywords_are_refused(byte_tokenizer: TextTokenizer) -> None:
    with pytest.raises(UsageError, match="top_k"):
        _scripted(byte_tokenizer).generate_until(_generations(("x", {"top_k": 3})))


# Scoring


def test_scores_come_in_the_order_of_the_requests(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, weigh=lambda context, continuation: -len(continuation) / 4)
    found = lm.loglikelihood(_pairs(("long context", " ab"), ("c", "x"), ("long context", "abcde"), ("", "zz")))
    assert found == [(-0.75, True), (-0.25, True), (-1.25, False), (-0.5, True)]


class _Reference(TemplateLM):
    """lm-eval's own encoding of pairs."""

    eot_token_id = END_ID

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self._encode = tokenizer.encode

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encode(string)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = generate_until = _loglikelihood_tokens


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("Answer:", " A"), ("Answer: ", "A"), ("<|assistant|>\n", "B"), ("naïve", " 日本"), ("x", ""), ("a\n\n", "b c")],
)
def test_pairs_are_encoded_as_the_harness_does(byte_tokenizer: TextTokenizer, context: str, continuation: str) -> None:
    theirs = _Reference(byte_tokenizer)._encode_pair(context, continuation)
    assert tuple(map(list, encode_pair(byte_tokenizer, context, continuation))) == theirs


def test_pairs_of_the_real_tokenizer(shared: Path) -> None:
    tokenizer = TextTokenizer(shared / "fast_dllm_v2_7b")
    reference = _Reference(tokenizer)
    for pair in (("The answer is", " 42"), ("The answer is ", "42"), ("Answer:\n", "A"), ("un", "believable")):
        assert tuple(map(list, encode_pair(tokenizer, *pair))) == reference._encode_pair(*pair)


def test_a_long_context_is_cut_and_a_longer_continuation_refused(
    byte_tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lm = _scripted(byte_tokenizer, weigh=lambda context, continuation: -float(len(context)), max_positions=32)
    with caplog.at_level(logging.WARNING):
        assert lm.loglikelihood(_pairs(("c" * 100, "abcd"))) == [(-28.0, False)]
    assert "1 of 1 prompts" in caplog.text
    with pytest.raises(UsageError, match="leave no room"):
        lm.loglikelihood(_pairs(("c", "x" * 32)))


@pytest.mark.parametrize("score_stop", [False, True])
def test_a_context_is_cut_to_just_what_fits(byte_tokenizer: TextTokenizer, score_stop: bool) -> None:
    """With the stop token scored, one position less is left."""
    lengths: list[int] = []

    def weigh(context: str, continuation: str) -> float:
        lengths.append(len(context))
        return 0.0

    lm = _scripted(byte_tokenizer, weigh=weigh, max_positions=32)
    lm.settings = AdapterSettings(score_stop=score_stop)
    room = 32 - 4 - score_stop
    lm.loglikelihood(_pairs(("c" * room, "abcd"), ("d" * (room + 1), "abcd")))
    assert set(lengths) == {room}
    longest = "x" * (31 - score_stop)
    lm.loglikelihood(_pairs(("c", longest)))
    with pytest.raises(UsageError, match="32 tokens leave no room"):
        lm.loglikelihood(_pairs(("c", longest + "x")))


def test_rolling_counts_every_token_once(byte_tokenizer: TextTokenizer) -> None:
    seen: list[str] = []

    def weigh(context: str, continuation: str) -> float:
        seen.append(continuation)
        return -float(len(continuation))

    lm = _scripted(byte_tokenizer, weigh=weigh, max_positions=33)
    text = "".join(chr(97 + place % 26) for place in range(100))
    requests = [
        Instance("loglikelihood_rolling", {}, (each,), 0, metadata=("task", place, 1))
        for place, each in enumerate((text, "short", ""))
    ]
    assert lm.loglikelihood_rolling(requests) == [-100.0, -5.0, 0.0]
    windows = sorted(set(seen) - {"short"}, key=text.find)
    assert "".join(windows) == text


def test_rolling_needs_a_bos_token(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, bos_id=None)
    with pytest.raises(UsageError, match="bos token"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("text",), 0)])


# Records


def test_records_are_handed_over_one_by_one_and_answer_again(byte_tokenizer: TextTokenizer) -> None:
    records: list[RequestRecord] = []
    requests = _generations(("bb", {}), ("a", {"max_gen_toks": 9}))
    pairs = _pairs(("context", " x"), ("context", " yy"))
    engine = ScriptedEngine(byte_tokenizer, write=str.upper, weigh=lambda context, continuation: -len(continuation) / 3)
    first = StepsaverLM(engine, byte_tokenizer, on_record=records.append)  # type: ignore[arg-type]
    answers, scores = first.generate_until(requests), first.loglikelihood(pairs)
    assert len(records) == 4
    assert {(record.key.task, record.key.document) for record in records} == {("task", 0), ("task", 1)}
    generation = [record for record in records if record.path == "generation"]
    stored = [record_from_json(json.loads(json.dumps(record_to_json(record)))) for record in generation]
    again = StepsaverLM(ScriptedEngine(byte_tokenizer), byte_tokenizer, known=stored)  # type: ignore[arg-type]
    assert again.generate_until(requests) == answers == ["BB", "A"]
    assert again.meters["generation"].requests == 0
    scored = [record_from_json(record_to_json(record)) for record in records if record.path == "scoring"]
    lm = StepsaverLM(ScriptedEngine(byte_tokenizer), byte_tokenizer, known=scored)  # type: ignore[arg-type]
    assert lm.loglikelihood(pairs) == scores


def test_what_was_answered_before_an_interruption_is_not_lost(byte_tokenizer: TextTokenizer) -> None:
    records: list[RequestRecord] = []

    def write(prompt: str) -> str:
        if prompt == "cc" and len(records) == 1:
            raise KeyboardInterrupt
        return prompt.upper()

    requests = _generations(("a", {}), ("cc", {}), ("bbb", {}))
    engine = ScriptedEngine(byte_tokenizer, write=write)
    lm = StepsaverLM(engine, byte_tokenizer, on_record=records.append)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(requests)
    assert [record.text for record in records] == ["A"]
    rest = StepsaverLM(ScriptedEngine(byte_tokenizer, write=str.upper), byte_tokenizer, known=list(records))  # type: ignore[arg-type]
    assert rest.generate_until(requests) == ["A", "CC", "BBB"]
    assert rest.meters["generation"].requests == 2


def test_a_stored_answer_to_another_prompt_is_refused(byte_tokenizer: TextTokenizer) -> None:
    records: list[RequestRecord] = []
    engine = ScriptedEngine(byte_tokenizer, write=str.upper)
    StepsaverLM(engine, byte_tokenizer, on_record=records.append).generate_until(_generations(("a", {})))  # type: ignore[arg-type]
    lm = StepsaverLM(engine, byte_tokenizer, known=records)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="belongs to another prompt"):
        lm.generate_until(_generations(("b", {})))
    longer = AdapterSettings(default_new_tokens=300)
    lm = StepsaverLM(engine, byte_tokenizer, known=records, settings=longer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="belongs to another prompt"):
        lm.generate_until(_generations(("a", {})))


def test_repeats_of_a_request_are_kept_apart(byte_tokenizer: TextTokenizer) -> None:
    records: list[RequestRecord] = []
    engine = ScriptedEngine(byte_tokenizer, write=str.upper)
    request = _generations(("a", {}))[0]
    lm = StepsaverLM(engine, byte_tokenizer, on_record=records.append)  # type: ignore[arg-type]
    assert lm.generate_until([request] * 3) == ["A"] * 3
    assert sorted(record.key.repeat for record in records) == [0, 1, 2]


# Speed, and a real engine


def test_what_both_paths_took(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, write=lambda prompt: "xyz")
    lm.generate_until(_generations(("a", {}), ("bb", {})))
    generation = lm.meters["generation"]
    counted = (2, 8, 3)  # with the stop tokens
    assert (generation.requests, generation.tokens, generation.prompt_tokens) == counted
    assert generation.trace.decode_seconds == 1.0  # the scripted forwards; the warm-up's is not among them
    assert generation.warm_up_seconds > 0
    lm.loglikelihood(_pairs(("c", "ab"), ("c", "d")))
    assert (lm.meters["scoring"].requests, lm.meters["scoring"].tokens) == (2, 3)
    assert (generation.requests, generation.tokens, generation.prompt_tokens) == counted


@pytest.fixture(scope="module")
def tiny_lm(byte_tokenizer: TextTokenizer) -> StepsaverLM:
    config = tiny_config(vocab=VOCABULARY, mask_id=MASK_ID, stop_ids=(END_ID,), bos_id=END_ID)
    engine = Engine(sharpened(random_model(config, dtype=torch.float64, seed=3)), batch_size=3)
    return StepsaverLM(engine, byte_tokenizer)


def test_a_real_engine_gives_the_same_answers_in_any_company(tiny_lm: StepsaverLM) -> None:
    requests = _generations(*((f"prompt {n} " * (n + 1), {"max_gen_toks": 20 + n % 2}) for n in range(5)))
    together = tiny_lm.generate_until(requests)
    assert together == [tiny_lm.generate_until([request])[0] for request in requests]


PAIRS = [
    ("The context of a question:", " A"),
    ("The context of a question:", " B"),
    ("The context of a question:", " several tokens"),
    ("x" * 16, "yz"),  # whole blocks
    ("short", " and a continuation that is longer than one block"),
    ("context", ""),
    ("", "behind one bos token"),
]


@pytest.mark.parametrize("estimator", ["trajectory", "reference"])
@pytest.mark.parametrize("score_stop", [False, True])
def test_a_real_engine_scores_through_the_adapter(
    tiny_lm: StepsaverLM, byte_tokenizer: TextTokenizer, estimator: Any, score_stop: bool
) -> None:
    """The adapter adds nothing of its own to what the engine says of the same ids."""
    settings = AdapterSettings(estimator=estimator, score_stop=score_stop)
    lm = StepsaverLM(tiny_lm.engine, byte_tokenizer, settings=settings)
    requests = [ScoreRequest(*encode_pair(byte_tokenizer, *pair)) for pair in PAIRS]
    alone = [next(iter(lm.engine.score([each], estimator=estimator, score_stop=score_stop))) for each in requests]
    found = lm.loglikelihood(_pairs(*PAIRS))
    assert [value for value, _ in found] == pytest.approx([each.loglikelihood for each in alone], abs=1e-9)
    assert [greedy for _, greedy in found] == [each.is_greedy for each in alone]
    assert lm.meters["scoring"].tokens == lm.meters["scoring"].trace.tokens_scored
    if not score_stop:
        assert found[5] == (0.0, True)  # an empty continuation


def test_a_real_engine_scores_a_long_text(tiny_lm: StepsaverLM) -> None:
    text = "a long text, " * 60  # over the model's positions
    (value,) = tiny_lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert value < 0
    assert tiny_lm.meters["scoring"].tokens == len(text)


def test_the_harness_contract(tiny_lm: StepsaverLM) -> None:
    assert (tiny_lm.rank, tiny_lm.world_size, tiny_lm.device) == (0, 1, None)
    assert tiny_lm.tokenizer_name
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    prompt = tiny_lm.apply_chat_template(messages)  # type: ignore[arg-type]
    assert prompt == "<|system|>S<|end|><|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|><|assistant|>"
    assert tiny_lm.chat_template(True)
    assert tiny_lm.chat_template(False) is None


@pytest.mark.long
def test_ten_thousand_requests(byte_tokenizer: TextTokenizer) -> None:
    lm = _scripted(byte_tokenizer, write=str.upper, weigh=lambda context, continuation: -float(continuation))
    prompts = [f"{'x' * (place * 7919 % 97)}{place}" for place in range(10_000)]
    assert lm.generate_until(_generations(*((p, {}) for p in prompts))) == [p.upper() for p in prompts]
    scores = lm.loglikelihood(_pairs(*(("c" * (place * 7919 % 97), f" {place}") for place in range(10_000))))
    assert [value for value, _ in scores] == [-float(place) for place in range(10_000)]
