"""`import stepsaver` as somebody meets it who has read the README and no source file."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepsaver
from stepsaver.api.model import GenerateOptions
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.suffix_dropout import SuffixDropout
from stepsaver.engine.rules.trim import Trim

PROMPTS = ["Tom has 12 pens and buys 5 more pens. How many pens does Tom have?", "x", "A longer text. " * 5]


def test_what_generate_takes_is_written_in_three_places_and_is_the_same() -> None:
    """In the options of its overloads, and with defaults in its signature and in what `stream` asks for."""
    taken = inspect.signature(stepsaver.Model.generate).parameters
    assert taken.keys() - {"self", "prompts", "n", "ids", "details"} == GenerateOptions.__annotations__.keys()
    asked = inspect.signature(stepsaver.Model._ask).parameters
    for name, kind in GenerateOptions.__annotations__.items():
        assert asked[name].default == taken[name].default
        assert asked[name].annotation == taken[name].annotation == kind


def test_texts_come_in_the_prompts_order_whatever_finishes_first(embedded: stepsaver.Model) -> None:
    alone = [embedded.generate(prompt, max_new_tokens=48) for prompt in PROMPTS]
    for batch_size in (1, 3):
        assert embedded.generate(PROMPTS, max_new_tokens=48, batch_size=batch_size) == alone


def test_it_answers_a_question_with_rules(embedded: stepsaver.Model) -> None:
    assert "17" in embedded.generate(PROMPTS[0], rules=["suffix_dropout", "trim"])


def test_the_command_line_gives_the_same_texts(tiny: stepsaver.Model, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    command = [sys.executable, "-m", "stepsaver", "generate", "--model", str(tiny.folder), "--dtype", "float64"]
    command += ["--prompts", str(lines), "--json", "--max-new-tokens", "20", "--rule", "trim"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    samples = json.loads(done.stdout)["samples"]
    assert tiny.generate(PROMPTS, rules="trim", max_new_tokens=20) == [each["text"] for each in samples]
    assert tiny.generate(PROMPTS, rules="trim", max_new_tokens=20, ids=True) == [each["ids"] for each in samples]


def test_the_chat_template_is_applied_unless_told_otherwise(tiny: stepsaver.Model) -> None:
    as_chat, as_text = tiny.encode("<|user|>hi<|end|><|assistant|>"), tiny.encode("hi")
    texts = {chat: tiny.generate("hi", chat=chat, max_new_tokens=12, ids=True) for chat in (True, False)}
    assert texts[True] == tiny.generate(as_chat, max_new_tokens=12, ids=True)
    assert texts[False] == tiny.generate(as_text, max_new_tokens=12, ids=True)
    assert texts[True] != texts[False]


def test_rules_and_policies_are_texts_or_objects(tiny_folder: Path) -> None:
    tiny = stepsaver.load(tiny_folder, dtype="float64", sub_block_size=4)
    by_text = tiny.generate(
        PROMPTS, rules=["suffix_dropout", "trim:level=changed"], policy="threshold:threshold=0.3", max_new_tokens=30
    )
    by_object = tiny.generate(
        PROMPTS, rules=[SuffixDropout(), Trim(level="changed")], policy=Threshold(0.3), max_new_tokens=30
    )
    by_threshold = tiny.generate(
        PROMPTS, rules=["suffix_dropout", Trim(level="changed")], threshold=0.3, max_new_tokens=30
    )
    assert by_text == by_object == by_threshold


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    batch_size=st.integers(1, 3),
    chosen=st.sampled_from(
        [
            {"policy": "threshold:threshold=0.1"},
            {"policy": "fixed:rows=3"},
            {"decode": "speculative:positions=8"},
            {"decode": "autoregressive"},
        ]
    ),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_pieces_make_up_the_text_and_nothing_is_taken_back(
    tiny: stepsaver.Model, prompts: list[str], batch_size: int, chosen: dict[str, str], temperature: float
) -> None:
    asked: dict[str, Any] = {**chosen, "batch_size": batch_size, "max_new_tokens": 21}
    if "speculative" in chosen.get("decode", ""):
        temperature = 0.0
    texts = tiny.generate(prompts, temperature=temperature, **asked)
    ids = tiny.generate(prompts, temperature=temperature, ids=True, **asked)
    pieces = list(tiny.stream(prompts, temperature=temperature, **asked))
    for index, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
        mine = [piece for piece in pieces if piece.prompt == index]
        assert "".join(map(str, mine)) == text
        assert [token for piece in mine for token in piece.ids] == tokens
        assert [piece.is_last for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert all(piece.ids or piece.is_last for piece in mine)


def test_pieces_come_while_the_answer_is_written(embedded: stepsaver.Model) -> None:
    stream = embedded.stream(PROMPTS[0])
    first = next(stream)
    assert not first.is_last
    rest = list(stream)
    assert len(rest) >= 2
    assert first.text + "".join(piece.text for piece in rest) == embedded.generate(PROMPTS[0])


def test_scores_are_those_of_the_command_line(tiny: stepsaver.Model, tmp_path: Path) -> None:
    pairs = [("The sky is", " blue"), ("a ", "b"), ("", "c"), ("abc", "")]
    scores = tiny.score(pairs, batch_size=2)
    assert [score.index for score in scores] == [0, 1, 2, 3]
    lines = tmp_path / "requests.jsonl"
    lines.write_text("".join(json.dumps({"context": c, "continuation": t}) + "\n" for c, t in pairs), encoding="utf-8")
    command = [sys.executable, "-m", "stepsaver", "score", "--model", str(tiny.folder), "--dtype", "float64"]
    done = subprocess.run([*command, "--requests", str(lines), "--json"], capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)["scores"]
    assert [score.loglikelihood for score in scores] == pytest.approx([each["loglikelihood"] for each in found])
    by_ids = tiny.score([(tiny.encode("The sky is"), tiny.encode(" blue"))])
    assert by_ids[0].loglikelihood == pytest.approx(scores[0].loglikelihood)
    assert scores[3].loglikelihood == 0


def test_a_surer_continuation_scores_higher(embedded: stepsaver.Model) -> None:
    prompt = embedded.opened.tokenizer.chat_prompt([{"role": "user", "content": PROMPTS[0]}])
    answer = embedded.generate(PROMPTS[0])
    right, wrong = embedded.score([(prompt, answer), (prompt, answer.replace("17", "93"))])
    assert right.loglikelihood > wrong.loglikelihood
    messages = [{"role": "user", "content": PROMPTS[0]}]
    (by_chat,), (by_messages,) = embedded.score([(PROMPTS[0], answer)], chat=True), embedded.score([(messages, answer)])
    assert by_chat.loglikelihood == by_messages.loglikelihood > -0.5
    assert by_chat.loglikelihood == pytest.approx(right.loglikelihood)
    assert embedded.score([(PROMPTS[0], answer)])[0].loglikelihood < -50


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rules": ["trimm"]}, "unknown rule 'trimm'; nearest: trim"),
        ({"rules": [7]}, "7 is no rule"),
        ({"rules": [Trim]}, "is no rule"),
        ({"rules": ["trim", "trim"]}, "given twice"),
        ({"policy": 3}, "3 is no policy"),
        ({"policy": Threshold}, "is no policy"),
        ({"policy": Threshold(), "threshold": 0.5}, "exclude each other"),
        ({"threshold": 2.0}, "threshold 2.0 is not a number from 0 to 1"),
        ({"batch_size": 0}, "batch_size 0 is not a whole number from 1 on"),
        ({"temperature": -1.0}, "temperature -1.0 is not a number from 0 to"),
        ({"temperature": 1e-310}, r"temperature 1e-310 is not a number from 0 to 1e\+100, or below 1e-100 only 0"),
        ({"top_k": 0}, "top_k 0 is not a whole number from 1 on"),
        ({"stop": ["a", ""]}, "stop: '' is not a text"),
        ({"policy": Trim()}, "is no policy"),
        ({"prompts": [[{"role": "robot", "content": "x"}]]}, "prompt 0: .* is not a message: expected a role, one of"),
        ({"prompts": [[{"role": "user"}]]}, "prompt 0: .* is not a message"),
        ({"max_new_tokens": 5000}, "prompt 0: .* exceed the model's 1024 positions"),
        ({"max_new_tokens": -1}, "max_new_tokens -1 is not a whole number from 0 on"),
        ({"prompts": [[1, 2], [1, 9999]]}, "prompt 1: id 9999 is outside the vocabulary"),
        ({"prompts": [[1, "a"]]}, "prompt 0: .* neither a text nor a list of token ids"),
        ({"prompts": [3, "a"]}, "prompt 0: 3 is neither"),
        ({"prompts": ["\ud800"]}, "prompt 0: character 0 is not valid Unicode"),
    ],
)
def test_what_is_wrong_is_one_line_and_comes_from_the_call(
    tiny: stepsaver.Model, wrong: dict[str, Any], message: str
) -> None:
    asked = {"prompts": ["x"]} | wrong
    for call in (tiny.generate, tiny.stream):
        with pytest.raises(stepsaver.UsageError, match=message) as raised:
            call(**asked)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("pair", "message"),
    [("ab", "pair 0: 'ab' is not"), (("a",), "pair 0"), (("a", [1]), "two of one kind"), (([1], [2.0]), "neither")],
)
def test_a_wrong_pair_is_one_line(tiny: stepsaver.Model, pair: Any, message: str) -> None:
    with pytest.raises(stepsaver.UsageError, match=message):
        tiny.score([pair])


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for name in ("no such", tmp_path, ""):
        with pytest.raises(stepsaver.UsageError) as raised:
            stepsaver.load(name)
        assert "\n" not in str(raised.value)


def test_without_a_tokenizer_ids_go_in_and_out(tiny: stepsaver.Model, tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    model = stepsaver.load(tmp_path, mask_id=0, dtype="float64")
    assert model.generate([[5, 6]], ids=True) == tiny.generate([[5, 6]], ids=True)
    with pytest.raises(stepsaver.UsageError, match=r"no usable tokenizer .* prompts are token ids \(--ids, in Python"):
        model.generate([[5, 6]])


def test_one_prompt_has_one_answer_in_whatever_form_it_is(tiny: stepsaver.Model) -> None:
    ids = tiny.encode("<|user|>hi<|end|><|assistant|>")
    answer = tiny.generate("hi", max_new_tokens=12)
    messages = [{"role": "user", "content": "hi"}]
    forms: list[Any] = [messages, ids, tuple(ids), np.array(ids), np.array(ids, dtype=np.uint16), torch.tensor(ids)]
    for form in forms:
        assert tiny.generate(form, max_new_tokens=12) == answer
        assert tiny.generate([form, "hi"], max_new_tokens=12) == [answer, answer]
    both: Any = torch.tensor([ids, ids])
    assert tiny.generate(both, max_new_tokens=np.int64(12), batch_size=torch.tensor(2)) == [answer, answer]


def test_an_answer_goes_on_where_the_assistant_has_begun(tiny: stepsaver.Model) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    as_text = tiny.generate("<|user|>hi<|end|><|assistant|>Well", chat=False, max_new_tokens=9)
    assert tiny.generate(begun, max_new_tokens=9) == as_text


def test_several_answers_depend_on_seed_prompt_and_number_alone(tiny: stepsaver.Model) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 10, "ids": True}
    four = tiny.generate("hi", n=4, **asked)
    assert len({tuple(each) for each in four}) == 4
    assert tiny.generate("hi", n=2, **asked) == four[:2]
    assert tiny.generate("hi", **asked) == four[0]
    assert tiny.generate("hi", n=1, **asked) == four[:1]
    assert tiny.generate(["other", "hi"], n=4, batch_size=3, **asked)[1] == four
    assert tiny.generate("hi", n=4, seed=1, **asked)[1] != four[1]
    with pytest.raises(stepsaver.UsageError, match="n 2 needs a temperature"):
        tiny.generate("hi", n=2)


def test_top_k_leaves_the_likeliest(tiny: stepsaver.Model) -> None:
    greedy = tiny.generate(PROMPTS, max_new_tokens=10, decode="autoregressive", ids=True)
    asked: dict[str, Any] = {"max_new_tokens": 10, "decode": "autoregressive", "ids": True, "temperature": 1.0}
    assert tiny.generate(PROMPTS, top_k=1, **asked) == greedy
    assert tiny.generate(PROMPTS, top_k=10**6, **asked) == tiny.generate(PROMPTS, **asked) != greedy


@pytest.mark.parametrize("decode", ["block", "speculative", "autoregressive"])
def test_an_answer_ends_before_a_stop_string(embedded: stepsaver.Model, decode: str) -> None:
    whole = embedded.generate(PROMPTS[0], decode=decode)
    assert "5 = " in whole
    before = whole.partition(" = ")[0]
    answer = embedded.generate(PROMPTS[0], decode=decode, stop=["nothing", " = "], details=True)
    assert (str(answer), answer.finish) == (before, "stop")
    assert " = " in embedded.decode(answer.ids)
    assert " = " not in embedded.decode(answer.ids[:-1])
    assert len(answer.confidences) == len(answer.ids)
    pieces = list(embedded.stream(PROMPTS[0], decode=decode, stop=" = "))
    assert "".join(map(str, pieces)) == before
    assert [token for piece in pieces for token in piece.ids] == answer.ids
    assert embedded.generate(PROMPTS[0], decode=decode, stop="nothing") == whole


@pytest.mark.parametrize("decode", ["block", "speculative", "autoregressive"])
def test_details_say_how_an_answer_was_decoded(embedded: stepsaver.Model, tmp_path: Path, decode: str) -> None:
    plain = embedded.generate([PROMPTS[0], "What is 3 + 4?"], details=True, batch_size=2, decode=decode)
    assert [each.text for each in plain] == embedded.generate([PROMPTS[0], "What is 3 + 4?"], decode=decode)
    for each in plain:
        assert len(each.confidences) == len(each.ids)
        assert all(0 < sure <= 1 for sure in each.confidences)
        assert (each.finish, each.positions_saved) == ("stop", 0.0)
        assert each.positions_computed > each.forwards > 0 < each.seconds
        assert "embedded" in each.trace(tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(stepsaver.UsageError, match="no page can be written there"):
        plain[0].trace(tmp_path / "missing" / "page.html")


def test_details_count_what_rules_left_out(tiny: stepsaver.Model) -> None:
    """TRIM leaves out positions that no decision needs: the same steps as without the rule, of fewer positions."""
    asked: dict[str, Any] = {"max_new_tokens": 24, "policy": "fixed", "details": True}
    plain, trimmed = (tiny.generate(PROMPTS[0], rules=rules, **asked) for rules in ((), "trim"))
    assert plain.forwards == trimmed.forwards
    assert trimmed.positions_saved > 0 == plain.positions_saved
    assert trimmed.positions_computed + trimmed.positions_saved == pytest.approx(plain.positions_computed)


def test_a_model_says_what_it_is(tiny: stepsaver.Model, tiny_folder: Path) -> None:
    assert (tiny.device, tiny.dtype) == (torch.device("cpu"), torch.float64)
    assert tiny.tokenizer.decode(tiny.tokenizer.encode("ab")) == "ab"
    by_torch = stepsaver.load(tiny_folder, dtype=torch.float64, device=torch.device("cpu"))
    assert by_torch.generate("ab", max_new_tokens=8) == tiny.generate("ab", max_new_tokens=8)


def test_every_public_name_is_there_and_no_other() -> None:
    assert {name for name in dir(stepsaver) if not name.startswith("_")} == set(stepsaver.__all__)
    assert stepsaver.rules()["trim"]
    assert stepsaver.policies()["threshold"].startswith("Unmasks every")
    assert all(getattr(stepsaver, name) is not None for name in stepsaver.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stepsaver.nothing  # noqa: B018


def test_no_prompts_no_texts(tiny: stepsaver.Model) -> None:
    assert tiny.generate([]) == list(tiny.stream([])) == tiny.score([]) == []
