"""Chat templates are foreign programs: they render as transformers renders them, within limits, or fail in one line."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.chat_template import ChatTemplate
from stepsaver.evaluation.embedded import MODEL_FOLDER
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.evaluation.byte_tokenizer import write_byte_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "é 漢 \U0001f600\n\n  two"},
    {"role": "assistant", "content": "yes "},
    {"role": "user", "content": ""},
]
TEMPLATES = [
    "{% for m in messages %}\n    {%- if m.role == 'user' %}\n  <{{ m.content | trim }}>\n {% endif %}\n{% endfor %}",
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ eos_token }}{{ bos_token }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index0 }}{% endfor %}",
    "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{% if tools %}x{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro say(x) %}[{{ x }}]{% endmacro %}{{ say(messages[1].content) }}{{ add_generation_prompt }}",
]


@pytest.mark.parametrize("opens_answer", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_texts_are_those_of_transformers(tmp_path: Path, template: str, opens_answer: bool) -> None:
    (write_byte_tokenizer(tmp_path) / "chat_template.jinja").write_text(template, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    ours = ChatTemplate(template, {"eos_token": theirs.eos_token})
    assert ours.render(CONVERSATION, opens_answer=opens_answer) == theirs.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=opens_answer
    )


def test_the_embedded_model_is_prompted_as_by_transformers() -> None:
    theirs = AutoTokenizer.from_pretrained(str(MODEL_FOLDER))
    ours = TextTokenizer(MODEL_FOLDER)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    assert ours.chat_prompt(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10**9 }}", "more than 256 MB"),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "more than 4194304 characters"),
        ("{{ 10 ** (10 ** 9) }}", "took too long|more than 256 MB"),
        ("{{", "TemplateSyntaxError"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[9].x.y }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_cannot_take_more_than_its_share(template: str, message: str) -> None:
    rendered = ChatTemplate(template, {})
    with pytest.raises(UsageError, match=message):
        rendered.render(CONVERSATION, opens_answer=True)


def test_a_template_that_was_stopped_is_started_again() -> None:
    """A loop costs its share of seconds and ends the process; the next conversation finds a new one."""
    template = ChatTemplate(
        "{% if messages %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}x",
        {},
    )
    with pytest.raises(UsageError, match="took too long"):
        template.render(CONVERSATION, opens_answer=True)
    assert template.render([], opens_answer=True) == "x"
