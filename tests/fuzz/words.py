"""What may stand on a command line: words that mean something somewhere, and texts of every rule and policy."""

import dataclasses

from hypothesis import strategies as st

from stepsaver.engine import registry

TEMPLATES = [
    "{{ 1/0 }}", "{{ 'a' * 10**9 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ messages[5].x.y }}", "{{",
    "{% x %}", "{{ raise_exception('no') }}", "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ ''.__class__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | tojson }}",
    "{{ 10 ** (10 ** 8) }}", "\x00", "",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "{{ strftime_now(1) }}",
    "{{ '%999999999d' % 1 }}", "{{ 'a'.center(10**10) }}", "{{ [0] * 10**9 }}", "{{ messages[0]['content'] }}",
]  # fmt: skip
WORDS = [
    "", " ", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e309", "0.5", "99999999999999999999", "9" * 5000, "10000000",
    "x", "../x", "/proc", "/proc/x/y", "/dev/full", "/dev/null", "missing/x", "a" * 300, "\udcff", "é\u202e", "\x1b[2J",
    "[", "{0}", "meta", "xpu", "mps", "cuda:99", "cpu:-1", "slurm", "none", "model", "data", "experiments/tiny", "a/b",
    "prompts.jsonl", "ids.jsonl", "requests.jsonl", "tiny", "baseline", "previous", "mini_ifeval", "gsm8k", "float16",
    "trim:level=drift", "trim:budget=nan", "layer_reuse:k=2,layers=0", "layer_reuse:k=9,layers=0-99999999999",
    "adaptive_layers:probe=1,threshold=nan", "threshold:threshold=nan", "quota:steps=1",
    "factor:factor=inf", "0:1", "0:nan", "1:1", "--", "-", "auto", "all", "float32", "bfloat16", "float64",
    "autoregressive", "reference", "qos=long", "=", "x=", "true", "exact_match", "embedded", "speculative",
]  # fmt: skip
VALUES = [
    "", "0", "1", "2", "-1", "9999999999", "nan", "inf", "0.5", "1e-300", "auto", "none", "all", "first", "0-1", "true",
    "false", "block", "causal", "drift", "x", "1,2", "0,99", "-", "always", "never", "never,span=1",
]  # fmt: skip
PACKAGES = ("stepsaver.engine.rules", "stepsaver.engine.policies", "stepsaver.engine.decoders")


@st.composite
def registry_texts(draw: st.DrawFn) -> str:
    """A rule or a policy with some of its fields, of values that may or may not be theirs."""
    known = registry.found_in(draw(st.sampled_from(PACKAGES)))
    name = draw(st.sampled_from(sorted(known)))
    fields = [field.name for field in dataclasses.fields(known[name])]
    chosen = draw(st.lists(st.sampled_from([*fields, "x"]), max_size=3))
    given = ",".join(f"{field}={draw(st.sampled_from(VALUES))}" for field in chosen)
    return f"{name}:{given}" if given else name


def _plain(text: str) -> str:
    """No call can pass a zero byte."""
    return text.replace("\x00", "0").encode("utf-8", "surrogateescape" if text.isascii() else "ignore").decode()


words = (
    st.sampled_from(WORDS)
    | registry_texts()
    | st.integers().map(str)
    | st.floats().map(str)
    | st.text(max_size=6).map(_plain)
)
