"""lm-eval's own command line with our engine in it, for users who have scripts around it.

    python -m stepsaver.evaluation.lm_eval_cli --model stepsaver \\
        --model_args pretrained=embedded,threshold=0.9,rules=[layer_reuse:k=2,layers=middle] \\
        --tasks mini_gsm8k --apply_chat_template --limit 10

lm-eval has no plug-in entry points, so this registers the model and then runs lm-eval. The tasks are lm-eval's own,
with its shuffles and scorers. Tasks that would give a wrong number, or run code without a sandbox, are refused here.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  (first, or lm-eval does not know its own models)
from lm_eval.api.registry import register_model

from stepsaver.engine.arguments import ARGUMENTS, TEXT, converted
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import BATCH_SIZE, COMPILE, ESTIMATORS, JOINS, WEIGHTS, Compile, Estimator, Join, Weights
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.machine import choose_device, choose_dtype
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.embedded import TASKS_FOLDER
from stepsaver.evaluation.hub_access import reachable_hub
from stepsaver.evaluation.open_model import open_model
from stepsaver.evaluation.recipe import read_recipe
from stepsaver.evaluation.special_tasks import require_ifeval
from stepsaver.evaluation.task_registry import find_declaration

# Why lm-eval cannot run a task that needs a preparation of ours, and which option `stepsaver run` needs for it.
REFUSED = {
    "gpqa": ("lm-eval reshuffles the choices between prompting and scoring", ""),
    "humaneval": ("lm-eval runs model-written programs without a sandbox", " --confirm-run-unsafe-code"),
}

SETTLED_BY_RECIPE = ("decode", "rules", "policy", "threshold", "sub_block_size", "join")
HARNESS_DEVICE = "cuda:0"  # what lm-eval passes if the user said nothing, even without such a device


@dataclass(frozen=True)
class ModelArguments:
    """What `--model_args` may say. `rules` is one rule, or several in brackets with `;` between them.

    `recipe` is a file of `stepsaver tune`. It replaces decoder, rules, policy, threshold, sub-block size and join, and
    sets the batch size if nothing else does.
    """

    pretrained: str
    revision: str | None = None
    recipe: str | None = None
    decode: str | None = None
    rules: str = ""
    policy: str | None = None
    threshold: float | None = None
    batch_size: int = BATCH_SIZE
    dtype: str = "auto"
    weights: Weights = WEIGHTS
    compile: Compile = COMPILE
    device: str = "auto"
    block_size: int | None = None
    sub_block_size: int | None = None
    mask_id: int | None = None
    prefix_cache: bool = DecodingSettings.prefix_cache
    block_cache: bool = DecodingSettings.block_cache
    join: Join = "auto"
    estimator: Estimator = "trajectory"
    score_stop: bool = False
    max_gen_toks: int = AdapterSettings.default_new_tokens

    @property
    def rule_texts(self) -> list[str]:
        return [text for text in self.rules.strip("[]").split(";") if text]


@register_model("stepsaver")
class RegisteredLM(StepsaverLM):
    """The adapter, made by lm-eval from a dictionary of strings and numbers."""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "RegisteredLM":
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        given.pop("max_batch_size", None)  # for automatic batch sizes, which we do not have
        if given.get("device") == HARNESS_DEVICE:
            given["device"] = "auto"
        if "recipe" in arg_dict and str(given.get("batch_size")) == str(BATCH_SIZE):
            given.pop("batch_size")  # what lm-eval passes if the user said nothing
        return cls._load(read_arguments(with_recipe({**given, **arg_dict})))

    @classmethod
    def _load(cls, arguments: ModelArguments) -> "RegisteredLM":
        opened = open_model(
            arguments.pretrained,
            revision=arguments.revision,
            device=arguments.device,
            dtype=arguments.dtype,
            weights=arguments.weights,
            compile=arguments.compile,
            block_size=arguments.block_size,
            sub_block_size=arguments.sub_block_size,
            mask_id=arguments.mask_id,
            prefix_cache=arguments.prefix_cache,
            block_cache=arguments.block_cache,
            join=arguments.join,
        )
        decoder = opened.decoder(
            arguments.decode, policy=arguments.policy, threshold=arguments.threshold, rules=arguments.rule_texts
        )
        tokenizer = opened.tokenizer  # so that a folder without one fails before the weights are read
        engine = opened.engine(decoder, batch_size=arguments.batch_size)
        settings = AdapterSettings(
            default_new_tokens=arguments.max_gen_toks,
            estimator=arguments.estimator,
            score_stop=arguments.score_stop,
        )
        return cls(engine, tokenizer, settings=settings)


def with_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the settings of their recipe, if there is one."""
    if not given.get("recipe"):
        return given
    settled = next((name for name in SETTLED_BY_RECIPE if name in given), None)
    if settled is not None:
        raise UsageError(f"--model_args: recipe and {settled} exclude each other")
    recipe = read_recipe(Path(str(given["recipe"])))
    filled = {
        "decode": recipe.decode,
        "rules": ";".join(recipe.rules),
        "policy": recipe.measured_policy,
        "sub_block_size": recipe.sub_block_size,
        "join": recipe.join,
        "batch_size": recipe.batch_size,
    }
    everything = {name: value for name, value in filled.items() if value is not None} | given
    device = choose_device(str(given.get("device", "auto")))
    dtype = str(choose_dtype(str(given.get("dtype", "auto")), device)).removeprefix("torch.")
    said = recipe.differences(
        model=str(given.get("pretrained")), dtype=dtype, device=device.type, batch_size=int(everything["batch_size"])
    )
    if said:
        print(f"note: {said}", file=sys.stderr)
    return everything


def read_arguments(given: dict[str, Any]) -> ModelArguments:
    """Checks names and types. lm-eval has already converted texts that look like numbers or booleans."""
    known = {field.name: field for field in fields(ModelArguments)}
    for name in given:
        if name not in known:
            raise unknown_name("model argument", name, known)
    missing = [name for name, field in known.items() if field.default is MISSING and name not in given]
    if missing:
        raise UsageError(f"--model_args needs {', '.join(missing)}")
    values = {name: _converted(name, value) for name, value in given.items()}
    for name, allowed in (("estimator", ESTIMATORS), ("join", JOINS)):
        if name in values and values[name] not in allowed:
            raise unknown_name(name, values[name], allowed)
    return ModelArguments(**values)


def _converted(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ";".join(str(each) for each in value)
    kind = ARGUMENTS.get(name := "max_new_tokens" if name == "max_gen_toks" else name, TEXT)
    if kind is not TEXT:
        return converted(name, int(value) if str(value).isdecimal() else value)
    return str(value)  # such as a rule that is called 5


def main(arguments: Sequence[str] | None = None) -> int:
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    sys.argv = ["lm-eval", *(sys.argv[1:] if arguments is None else arguments)]
    harness = HarnessCLI()
    read = harness.parse_args()
    try:
        if read.command == "run":
            given = _settings(read)
            check_run(given)
            if not given.get("include_path"):
                read.include_path = str(TASKS_FOLDER)
        with reachable_hub():
            harness.execute(read)
    except UsageError as error:
        print(f"stepsaver: {error}", file=sys.stderr)
        return 2
    return 0


def _settings(read: Namespace) -> dict[str, Any]:
    """What lm-eval will run: its options, and those of `--config` that no option replaces."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    stored = EvaluatorConfig.load_yaml_config(read.config) if read.config else {}
    return stored | {name: value for name, value in vars(read).items() if value}


def check_run(given: dict[str, Any]) -> None:
    """Refuses, before a model is loaded, what would fail or be wrong after generation."""
    if given.get("use_cache"):
        raise UsageError("--use_cache keys on the prompt alone and would mix the answers of different rules")
    tasks = given.get("tasks") or []
    for task in tasks.split(",") if isinstance(tasks, str) else map(str, tasks):
        declaration = find_declaration(task)
        preparation = declaration.preparation if declaration else None
        if preparation in REFUSED:
            reason, options = REFUSED[preparation]
            raise UsageError(f"task {task}: {reason}; use `stepsaver run EXPERIMENT --task {task}{options}`")
        if preparation == "ifeval":
            require_ifeval()


if __name__ == "__main__":
    sys.exit(main())
