"""Other ways in than the command line: what lm-eval hands to the model."""

import sys
from dataclasses import fields
from pathlib import Path

from hypothesis import strategies as st

from stepsaver.engine.errors import UsageError
from tests.fuzz.words import VALUES, registry_texts
from tests.fuzz.workspace import Case


def model_arguments(arguments: list[str]) -> int:
    """The model that lm-eval makes of `--model_args`, and what it makes of the text before."""
    from lm_eval.utils import simple_parse_args_string

    from stepsaver.evaluation.lm_eval_cli import RegisteredLM

    try:
        RegisteredLM.create_from_arg_obj(simple_parse_args_string(arguments[0]), {"batch_size": 1, "device": None})
    except UsageError as error:
        print(f"stepsaver: {error}", file=sys.stderr)
        return 2
    return 0


@st.composite
def entry_cases(draw: st.DrawFn, workspace: Path) -> Case:
    from stepsaver.evaluation.lm_eval_cli import ModelArguments

    names = [field.name for field in fields(ModelArguments)]
    given = {"pretrained": "model"}
    for name in draw(st.lists(st.sampled_from([*names, "rules", "policy", "x"]), min_size=1, max_size=3)):
        given[name] = draw(st.sampled_from([*VALUES, "model", "float16", "embedded"]) | registry_texts())
    return Case([",".join(f"{name}={value}" for name, value in given.items())], command=model_arguments)
