"""The flags of `stepsaver run` that override what the experiment's file says, and the experiment with them applied."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.commands._model_options import say_differences
from stepsaver.engine.defaults import ESTIMATORS
from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.bench.experiment import Experiment

# Flags that are a field of the experiment's file, under the same name.
FIELDS = ("num_fewshot", "metric", "max_new_tokens", "dtype", "weights", "compile", "device", "estimator")
NOT_IN_A_NAME = re.compile(r"[^\w.+-]")
LEAST = {"num_fewshot": 0, "max_new_tokens": 1, "batch_size": 1}


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("instead of what the experiment's file says; part of the run's identity")
    group.add_argument("--num-fewshot", type=int, metavar="N", help="examples in a prompt (default: the task's own)")
    group.add_argument("--metric", metavar="M", help="what counts as accuracy, `metric,filter` of lm-eval's results")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer, whatever the task's own limit")
    group.add_argument("--decode", metavar="D", help="the decoder of configs that name none")
    group.add_argument("--threshold", type=float, metavar="X", help="unmask rows surer than this")
    group.add_argument("--policy", metavar="P", help="the decode policy of configs that name none")
    group.add_argument("--batch-size", type=int, metavar="N", help="samples decoded together")
    group.add_argument(
        "--recipe", type=Path, metavar="FILE", help="a tuning's settings, as a further config beside the baseline"
    )
    group.add_argument("--dtype", help="auto, float32, float64, bfloat16 or float16")
    group.add_argument("--weights", help="on a CPU: auto (in 16 bits where float16 holds them), float32 or float16")
    group.add_argument("--compile", help="on a GPU, functions that torch compiles: auto, on or off")
    group.add_argument("--device", help="auto, cpu, cuda, cuda:1, ...")
    group.add_argument("--estimator", choices=ESTIMATORS, help="how log-likelihoods are computed")


def with_settings(experiment: "Experiment", options: argparse.Namespace) -> "Experiment":
    """Returns the experiment with the given settings. What differs from the file is kept on record for the audit."""
    for name, least in LEAST.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value} is less than {least}")
    spec = experiment.spec
    changes: dict[str, Any] = {name: value for name in FIELDS if (value := getattr(options, name)) is not None}
    if options.batch_size is not None:
        changes |= {"batch_size": options.batch_size, "batch_size_elsewhere": options.batch_size}
    given = {name: value for name, value in changes.items() if value != getattr(spec, name)}
    wanted = {name: value for name in ("decode", "policy") if (value := _chosen(name, options)) is not None}
    decoding = {name: value for name, value in wanted.items() if value != getattr(spec.decoding, name)}
    if decoding:
        changes["decoding"] = spec.decoding.model_copy(update=decoding)
        given |= decoding
    given |= {name: value for name in ("block_size", "mask_id") if (value := getattr(options, name)) is not None}
    return replace(experiment, spec=spec.model_copy(update=changes), given=given)


def with_recipe(experiment: "Experiment", options: argparse.Namespace) -> "Experiment":
    """Returns the experiment with a recipe as a further config, named after its file and chosen to be run."""
    from stepsaver.bench.experiment import ConfigSpec
    from stepsaver.evaluation.recipe import read_recipe

    if options.recipe is None:
        return experiment
    recipe, name = read_recipe(options.recipe), NOT_IN_A_NAME.sub("_", options.recipe.stem).lstrip("_.+-") or "recipe"
    if any(config.name == name for config in experiment.configs):
        raise UsageError(f"--recipe {options.recipe}: {experiment.name} has a config {name} already")
    options.configs.append(name)
    config = ConfigSpec(name=name, **recipe.model_dump(include={"decode", "rules", "policy", "sub_block_size", "join"}))
    spec = experiment.spec
    batch_size = spec.batch_size if options.model in (None, spec.model) else spec.batch_size_elsewhere
    model = options.model or spec.model
    say_differences(recipe, model, dtype=spec.dtype, device=spec.device, batch_size=batch_size)
    return replace(experiment, configs=(*experiment.configs, config))


def _chosen(name: str, options: argparse.Namespace) -> str | None:
    """Returns the text of the decoder or of the policy that was given. Raises if it says nothing that there is."""
    from stepsaver.engine.decoders.chosen import parse_decoder
    from stepsaver.engine.policies.policy import parse_policy, policy_text

    if name == "decode":
        if options.decode is not None:
            parse_decoder(options.decode)
        return options.decode
    if options.policy is None and options.threshold is None:
        return None
    text = policy_text(options.policy, options.threshold)
    parse_policy(text)
    return text
