"""`import stepsaver` as somebody meets it who has read the README and no source file."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Unpack, get_overloads, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepsaver
from stepsaver.api.model import GenerateOptions
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.near_rows import NearRows
from stepsaver.engine.rules.trim import Trim

PROMPTS = ["Tom has 12 pens and buys 5 more pens. How many pens does Tom have?", "x", "A longer text. " * 5]


def test_overloads_take_what_generate_takes() -> None:
    """By name and type: their options are written once, beside the signature that has the defaults."""
    taken = get_type_hints(stepsaver.Model.generate)
    overloads = get_overloads(stepsaver.Model.generate)
    assert len(overloads) == 3
    for each in overloads:
        own = get_type_hints(each)
        assert own["options"] == Unpack[GenerateOptions]
        assert taken.keys() == own.keys() - {"options"} | get_type_hints(GenerateOptions).keys()
    for name, kind in get_type_hints(GenerateOptions).items():
        assert taken[name] == kind
    names = inspect.signature(stepsaver.Model.generate).parameters
    assert GenerateOptions.__annotations__.keys() <= names.keys(), "help() lists them"


def test_texts_come_in_the_prompts_order_whatever_finishes_first(embedded: stepsaver.Model) -> None:
    alone = [next(embedded.generate(prompt, max_new_tokens=48)) for prompt in PROMPTS]
    for batch_size in (1, 3):
        assert list(embedded.generate(PROMPTS, max_new_tokens=48, batch_size=batch_size)) == alone


def test_it_answers_a_question_with_rules(embedded: stepsaver.Model) -> None:
    (text,) = embedded.generate(PROMPTS[:1], rules=["near_rows", "trim"])
    assert "17" in text


def test_the_command_line_gives_the_same_texts(tiny: stepsaver.Model, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    command = [sys.executable, "-m", "stepsaver", "generate", "--model", str(tiny.folder), "--dtype", "float64"]
    command += ["--prompts", str(lines), "--json", "--max-new-tokens", "20", "--rule", "trim"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    samples = json.loads(done.stdout)["samples"]
    assert list(tiny.generate(PROMPTS, rules="trim", max_new_tokens=20)) == [each["text"] for each in samples]
    assert list(tiny.generate(PROMPTS, rules="trim", max_new_tokens=20, ids=True)) == [each["ids"] for each in samples]


def test_the_chat_template_is_applied_unless_told_otherwise(tiny: stepsaver.Model) -> None:
    as_chat, as_text = tiny.encode("<|user|>hi<|end|><|assistant|>"), tiny.encode("hi")
    texts = {chat: list(tiny.generate(["hi"], chat=chat, max_new_tokens=12, ids=True)) for chat in (True, False)}
    assert texts[True] == list(tiny.generate([as_chat], max_new_tokens=12, ids=True))
    assert texts[False] == list(tiny.generate([as_text], max_new_tokens=12, ids=True))
    assert texts[True] != texts[False]


def test_rules_and_policies_are_texts_or_objects(tiny_folder: Path) -> None:
    tiny = stepsaver.load(tiny_folder, dtype="float64", sub_block_size=4)
    by_text = tiny.generate(
        PROMPTS, rules=["near_rows", "trim:level=changed"], policy="threshold:threshold=0.3", max_new_tokens=30
    )
    by_object = tiny.generate(
        PROMPTS, rules=[NearRows(), Trim(level="changed")], policy=Threshold(0.3), max_new_tokens=30
    )
    by_threshold = tiny.generate(PROMPTS, rules=["near_rows", Trim(level="changed")], threshold=0.3, max_new_tokens=30)
    assert list(by_text) == list(by_object) == list(by_threshold)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    batch_size=st.integers(1, 3),
    chosen=st.sampled_from(
        [
            {"policy": "threshold:threshold=0.1"},
            {"policy": "fixed:rows=3"},
            {"decode": "speculative:span=4"},
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
    texts = list(tiny.generate(prompts, temperature=temperature, **asked))
    ids = list(tiny.generate(prompts, temperature=temperature, ids=True, **asked))
    pieces = list(tiny.generate(prompts, temperature=temperature, stream=True, **asked))
    for index, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
        mine = [piece for piece in pieces if piece.prompt == index]
        assert "".join(map(str, mine)) == text
        assert [token for piece in mine for token in piece.ids] == tokens
        assert [piece.is_last for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert all(piece.ids or piece.is_last for piece in mine)


def test_pieces_come_while_the_answer_is_written(embedded: stepsaver.Model) -> None:
    stream = embedded.generate(PROMPTS[0], stream=True)
    first = next(stream)
    assert not first.is_last
    rest = list(stream)
    assert len(rest) >= 2
    assert first.text + "".join(piece.text for piece in rest) == next(embedded.generate(PROMPTS[0]))


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
    (answer,) = embedded.generate(PROMPTS[:1])
    right, wrong = embedded.score([(prompt, answer), (prompt, answer.replace("17", "93"))])
    assert right.loglikelihood > wrong.loglikelihood


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
        ({"threshold": 2.0}, "threshold 2.0 is outside"),
        ({"batch_size": 0}, "batch size 0 is not positive"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"max_new_tokens": 5000}, "prompt 0: .* exceed the model's 1024 positions"),
        ({"max_new_tokens": -1}, "max_new_tokens -1 is negative"),
        ({"prompts": [[1, 2], [1, 9999]]}, "prompt 1: id 9999 is outside the vocabulary"),
        ({"prompts": [[1, "a"]]}, "prompt 0: .* neither a text nor a list of token ids"),
        ({"prompts": [3]}, "prompt 0: 3 is neither"),
        ({"prompts": ["\ud800"]}, "prompt 0: character 0 is not valid Unicode"),
    ],
)
def test_what_is_wrong_is_one_line_and_comes_from_the_call(
    tiny: stepsaver.Model, wrong: dict[str, Any], message: str
) -> None:
    asked = {"prompts": ["x"]} | wrong
    for stream in (False, True):
        with pytest.raises(stepsaver.UsageError, match=message) as raised:
            tiny.generate(**asked, stream=stream)
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
    assert list(model.generate([[5, 6]], ids=True)) == list(tiny.generate([[5, 6]], ids=True))
    with pytest.raises(stepsaver.UsageError, match="no usable tokenizer"):
        model.generate([[5, 6]])


def test_every_public_name_is_there() -> None:
    assert set(stepsaver.__all__) <= set(dir(stepsaver))
    assert all(getattr(stepsaver, name) is not None for name in stepsaver.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stepsaver.nothing  # noqa: B018


def test_no_prompts_no_texts(tiny: stepsaver.Model) -> None:
    assert list(tiny.generate([])) == list(tiny.generate([], stream=True)) == tiny.score([]) == []
