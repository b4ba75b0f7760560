"""Chat templates are foreign programs: they render as transformers renders them, within limits, or fail in one line."""

import tracemalloc
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.chat_template import LONGEST, TEMPLATE, ChatTemplate
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
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{% else %}-{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content[:3] ~ loop.index ~ none }}{% endfor %}{{ messages[::-1][0].role }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ '-'.join(messages | map(attribute='role')) }}{{ 'ab' * 3 }}",
    "{{ '%s has %05d' % ('x', 42) }}{{ '%s' | format(1) }}{{ '{} {:>8} {a}'.format(1700000000, 'x', a=2) }}",
    "{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}{{ 'a' | center(9) }}{{ 'x\ny' | indent(4) }}",
    "{{ 7 % 4 }}{{ 2 ** 10 }}{{ 2 ** 0.5 }}{{ 3 * 4 }}{{ [1] + [2] }}{{ 'tool' in messages[0] }}",
    "{{ dict(a=1).items() | list }}{{ dict.fromkeys(['a'], 1) }}{{ namespace(self_=1).self_ }}{{ range(3) | list }}",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x | upper }}{% filter upper %}quiet{% endfilter %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{{ strftime_now('%%') }}",
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


AT_ONCE, ROUNDS = "makes more than 4194304 characters at once", "loops and texts exceed 67108864 characters"
DOUBLED = "{%% set ns = namespace(t='aa') %%}{%% for i in range(60) %%}%s{%% endfor %%}"
NESTED = DOUBLED % "{% set ns.t = [ns.t, ns.t] %}"
LONG = "{% set b = 'a' * 1000000 %}"
REFUSED = [
    ("{{ 1/0 }}", "ZeroDivisionError"),
    ("{{", "TemplateSyntaxError"),
    ("{{ raise_exception('no\nsystem message') }}", "TemplateError: no system message"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ namespace(__class__=1) }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ messages[9].x.y }}", "UndefinedError"),
    ("{% include 'x' %}", "no loader"),
    ("{{ lipsum(3) }}", "'lipsum' is undefined"),
    ("x" * (TEMPLATE + 1), "has more than 262144 characters"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    # recursion and loops
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}", ROUNDS),
    ("{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "RecursionError"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", ROUNDS),
    ("{% set r = range(99999) %}{% for i in r %}{% for j in r if false %}{% endfor %}{% endfor %}", ROUNDS),
    ("{% set x %}{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endset %}", ROUNDS),
    # operators
    ("{{ 'a' * 10**9 }}", AT_ONCE),
    ("{{ 10**9 * [1] }}", AT_ONCE),
    ("{{ 10 ** (10 ** 9) }}", AT_ONCE),
    ("{% set ns = namespace(t=3) %}{% for i in range(60) %}{% set ns.t = ns.t ** 9 %}{% endfor %}", AT_ONCE),
    ("{% set ns = namespace(t=3) %}{% for i in range(60) %}{% set ns.t = ns.t * ns.t %}{% endfor %}", AT_ONCE),
    ("{{ '%1000000000d' % 1 }}", AT_ONCE),
    ("{{ '%*d' % (10**9, 1) }}", AT_ONCE),
    ("{{ '%99999999d%99999999d' % (1, 1) }}", AT_ONCE),
    (DOUBLED % "{% set ns.t = ns.t + ns.t %}", ROUNDS),
    (DOUBLED % "{% set ns.t = ns.t ~ ns.t %}", AT_ONCE),
    (DOUBLED % "{% set ns.t %}{{ ns.t }}{{ ns.t }}{% endset %}", AT_ONCE),
    (
        LONG + "{% set ns = namespace(t=[]) %}{% for i in range(999) %}{% set ns.t = ns.t + [b[:-1]] %}{% endfor %}",
        ROUNDS,
    ),
    # values that contain one another
    *(
        (NESTED + each, AT_ONCE)
        for each in ("{{ ns.t }}", "{{ ns.t | tojson }}", "{{ ns.t | string }}", "{{ '' ~ ns.t }}")
    ),
    *((NESTED + each, AT_ONCE) for each in ("{{ '%s' % ns.t }}", "{{ '{}'.format(ns.t) }}", "{{ ns.t | pprint }}")),
    ("{{ (['a' * 4000000] * 1000) | join }}", AT_ONCE),
    # methods and filters
    ("{{ 'a'.center(10**9) }}", AT_ONCE),
    ("{{ 'a' | center(width=10**9) }}", AT_ONCE),
    ("{{ '%1000000000d' | format(1) }}", AT_ONCE),
    ("{{ '{:1000000000}'.format(1) }}", AT_ONCE),
    ("{{ '{:{w}}'.format(1, w='1000000000') }}", AT_ONCE),
    ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", AT_ONCE),
    (LONG + "{{ b.replace('a', b) }}", AT_ONCE),
    (LONG + "{{ b | replace('a', b) }}", AT_ONCE),
    (LONG + "{{ [b] | map('replace', 'a', b) | list }}", AT_ONCE),
    (LONG + "{{ b.join(b[:9999]) }}", AT_ONCE),
    (LONG + "{{ b[:9999] | join(b) }}", AT_ONCE),
    (LONG + "{{ b.translate({97: b}) }}", AT_ONCE),
    (LONG + "{{ b | indent(99) }}", AT_ONCE),
    ("{{ messages | tojson(indent=10**9) }}", AT_ONCE),
    ("{{ 'a\tb'.expandtabs(10**9) }}", AT_ONCE),
    ("{{ (1).to_bytes(10**9, 'big') }}", AT_ONCE),
    ("{{ [1] | batch(10**9, 0) | list }}", AT_ONCE),
]


@pytest.mark.parametrize(("template", "message"), REFUSED, ids=[each[-40:] for each, _ in REFUSED])
def test_a_template_cannot_take_more_than_its_share(template: str, message: str) -> None:
    """The limits count characters and rounds, not seconds, so they are the same on every machine."""
    with pytest.raises(UsageError) as raised:
        ChatTemplate(template, {}).render(CONVERSATION, opens_answer=True)
    assert message in str(raised.value)
    assert str(raised.value).startswith("the chat template fails: ")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_nothing_large_is_made_before_it_is_refused() -> None:
    tracemalloc.start()
    try:
        for template in (each for each, message in REFUSED if message == AT_ONCE and NESTED not in each):
            with pytest.raises(UsageError):
                ChatTemplate(template, {}).render(CONVERSATION, opens_answer=True)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_a_text_of_the_limit_is_made_and_one_character_more_is_not() -> None:
    template = ChatTemplate(f"{{{{ 'a' * {LONGEST} }}}}{{% if messages %}}b{{% endif %}}", {})
    with pytest.raises(UsageError, match=AT_ONCE):
        template.render(CONVERSATION, opens_answer=True)
    assert template.render([], opens_answer=True) == "a" * LONGEST
