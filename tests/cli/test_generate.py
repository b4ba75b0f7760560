"""What a newcomer types: no model, messages, several answers, stop strings; and what rules saved, in one line."""

import json
import re
from pathlib import Path

import pytest

import stepsaver
from stepsaver.cli import main

QUESTION = "Tom has 12 pens and buys 5 more pens. How many pens does Tom have?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def model() -> stepsaver.Model:
    return stepsaver.load()


def test_without_a_model_it_is_the_embedded_one_and_the_line_says_what_was_saved(
    model: stepsaver.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = model.generate(QUESTION, rules="trim", details=True)
    assert main(["generate", "--prompt", QUESTION, "--rule", "trim"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{answer.text}\n"
    found = re.search(r"(\d+) forwards, .*; (\d+) positions computed, (\d+) saved by rules", printed.err)
    assert found is not None
    expected = (answer.forwards, round(answer.positions_computed), round(answer.positions_saved))
    assert tuple(map(int, found.groups())) == expected


def test_messages_several_answers_and_stop_strings(
    model: stepsaver.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in ({"messages": MESSAGES}, {"prompt": "What is 3 + 4?"})))
    command = ["generate", "--prompts", str(path), "--n", "2", "--temperature", "1.2", "--top-k", "5", "--json"]
    assert main([*command, "--stop", " pens"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    asked = [MESSAGES, "What is 3 + 4?"]
    expected = model.generate(asked, n=2, temperature=1.2, top_k=5, stop=" pens", details=True)
    assert [each["text"] for each in samples] == [each.text for pair in expected for each in pair]
    assert [each["ids"] for each in samples] == [each.ids for pair in expected for each in pair]
    assert main(["generate", "--prompt", "x", "--n", "2"]) == 2
    assert "--n 2 needs a --temperature" in capsys.readouterr().err
    path.write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    assert main(["generate", "--prompts", str(path)]) == 2
    assert "is not a message: expected a role, one of system, user, assistant" in capsys.readouterr().err


def test_scores_of_answers_to_questions(
    model: stepsaver.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    answer = model.generate(QUESTION)
    lines = [{"context": QUESTION, "continuation": answer}, {"context": MESSAGES, "continuation": answer}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["score", "--requests", str(path), "--chat", "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["scores"]
    assert one == other
    assert -0.5 < one["loglikelihood"] == model.score([(QUESTION, answer)], chat=True)[0].loglikelihood


def test_a_folder_without_a_tokenizer_is_told_of_ids(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parents[1] / "golden"
    assert main(["generate", "--model", str(golden), "--prompt", "x"]) == 2
    assert "has no tokenizer.json; without one, prompts are token ids (--ids" in capsys.readouterr().err
