"""`stepsaver.compare`: configs side by side on a task. It runs an experiment of the bench, and writes its file."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.api.model import Model, Rules, recipe_path
from stepsaver.engine import registry
from stepsaver.engine.arguments import converted_all
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import chosen_policy
from stepsaver.engine.rules.rule import Rule, chosen_rules
from stepsaver.evaluation.encoding import checked_text
from stepsaver.extras import named_parts

if TYPE_CHECKING:
    import pandas

    from stepsaver.bench.audit import Finding
    from stepsaver.bench.experiment import Experiment
    from stepsaver.bench.statistics import Interval
    from stepsaver.bench.verdict import Verdict
    from stepsaver.report.cells import ReportTask

# Rules alone, a recipe's path, or fields of a config as in `experiment.yaml`, of which `recipe` may be one.
Config = Rules | os.PathLike[str] | Mapping[str, Any]
FROM_RECIPE = ("decode", "rules", "policy", "sub_block_size", "join")
FIRST_LINE = "# Written by stepsaver.compare, which may write it again.\n"
SUCCESS = {
    "confirm_if": {"speed_up": "> 1.2", "drop_points": "< 5"},
    "reject_if": {"speed_up": "< 1.05", "drop_points": "> 20"},
}


@dataclass(frozen=True)
class ComparedConfig:
    """One config's figures, each with its 95 % interval, and what they amount to."""

    name: str
    accuracy: "Interval"
    drop_points: "Interval"  # of accuracy, against the baseline on the same samples
    tokens_per_second: "Interval | None"  # the median over chunks
    speed_up: "Interval"  # against the baseline on the same chunks
    over_reference: "Interval | None"  # likewise, against autoregressive decoding by the same engine
    outcome: str  # confirmed, rejected, undecided, control, baseline or reference


class Comparison:
    """The results of `stepsaver.compare`, read from `folder`. Prints as a table with the verdict."""

    def __init__(self, experiment: "Experiment", task: "ReportTask", name: str, limit: int | None, kept: Any) -> None:
        self._experiment, self._task, self._name, self._limit = experiment, task, name, limit
        self._kept = kept  # a temporary folder, if there is one, lives as long as this object

    @property
    def folder(self) -> Path:
        """The experiment's folder, which `stepsaver report` can read."""
        return self._experiment.folder

    @property
    def verdict(self) -> "Verdict":
        """Whether any config is surely faster at a small drop: an outcome, a sentence, and a verdict on each config."""
        return self._task.verdict()

    @property
    def findings(self) -> "tuple[Finding, ...]":
        """What the audit found wrong with the results, or worth a remark."""
        return self._task.findings

    @property
    def configs(self) -> tuple[ComparedConfig, ...]:
        from stepsaver.bench.statistics import Interval
        from stepsaver.report.tables import unjudged

        outcomes = {each.config: each.outcome for each in self.verdict.configs}
        return tuple(
            ComparedConfig(
                each.config,
                Interval(each.accuracy, *each.accuracy_interval),
                each.paired.drop_points,
                each.rate,
                each.speed_up.smaller,
                each.over_reference.smaller if each.over_reference else None,
                outcomes.get(each.config, unjudged(each)),
            )
            for each in self._task.summaries
        )

    def __str__(self) -> str:
        from stepsaver.report.tables import result_text

        summaries, verdict = self._task.summaries, self.verdict
        lines = [f"{self._name}, {summaries[0].samples} samples, {self._experiment.spec.model}", ""]
        lines += [result_text(summaries, verdict), "", verdict.sentence, self._criterion()]
        return "\n".join([*lines, *map(str, self.findings)])

    __repr__ = __str__

    def _criterion(self) -> str:
        success = self._experiment.spec.success
        wanted, unwanted = success.confirm_if, success.reject_if
        return (
            f"confirmed: speed-up {wanted.speed_up} and drop {wanted.drop_points} points, by 95 % intervals;\n"
            f"rejected: speed-up {unwanted.speed_up} or drop {unwanted.drop_points} points (`success` sets others)"
        )

    def to_frame(self) -> "pandas.DataFrame":
        """Returns a row per config, a column per figure and interval bound (`speed_up_low`). Needs pandas."""
        with named_parts():
            import pandas

        return pandas.DataFrame([_columns(config) for config in self.configs]).set_index("name")

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page with the accuracy-speed figure, all tables and the answers side by side. Returns its path."""
        with named_parts():
            from stepsaver.bench.durable import write_beside
            from stepsaver.report.experiment_page import experiment_page
        task = _read(self._experiment, self._name, self._limit, with_documents=True)
        write_beside(Path(path), experiment_page(self._experiment, [task]))
        return Path(path)


def compare(
    model: Model,
    task: str,
    configs: Mapping[str, Config],
    *,
    limit: int | None = None,
    baseline: str | None = None,
    success: Mapping[str, Mapping[str, str]] | None = None,
    batch_size: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Runs a task with every config and says what each costs in accuracy and gains in speed.

    `configs` maps each name to rules, as `Model.generate` takes them, to a recipe's path (a `Path`), or to a mapping
    with `decode`, `rules`, `policy`, `threshold`, `prefix_cache`, `block_cache`, `join` or a `recipe` in their place.
    The first config is the baseline, unless `baseline` names another. Autoregressive decoding is timed beside them as
    a reference. `limit` is how many samples are run, from the first on: a few hundred show a drop below five points.
    Fewer than eight chunks, of two batches each, decide nothing until `stepsaver run FOLDER --repeats N` has timed them
    again. `success` has the bounds that decide, as in `experiment.yaml`: `{"confirm_if": {"speed_up": "> 1.2",
    "drop_points": "< 5"}, "reject_if": {...}}`. With a `folder`, every finished chunk is stored there and the same call
    goes on from it; without one, the results last as long as the object that is returned. `progress` is called with a
    config's name, how many of its chunks are done, and how many there are.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness draws bars of its own
    with named_parts():
        from stepsaver.bench.experiment_file import read_experiment
        from stepsaver.bench.run import RunRequest, make_shards, refuse_beside_others

        if not isinstance(model, Model):
            raise UsageError(f"{shown(model)} is no model: expected what stepsaver.load returns")
        if progress is not None and not callable(progress):
            raise UsageError(f"progress {shown(progress)} is no function")
        task, limit, batch_size, baseline = converted_all(
            "limit", "batch_size", "baseline", task=task, limit=limit, batch_size=batch_size, baseline=baseline
        ).values()
        content = _content(model, task, configs, baseline, batch_size)
        if success is not None:
            content["success"] = _plain(success)
        kept = None
        if folder is None:
            kept = tempfile.TemporaryDirectory(prefix="stepsaver-")
            folder = kept.name
        written = _folder(folder)
        _write_experiment(written, content)
        try:
            experiment = read_experiment(written, layers=model.opened.config.layers)
        except UsageError as error:  # what is wrong stands in the call, not in the file that was made of it
            raise UsageError(_without_file(str(error), written, tuple(configs))) from None
        request = RunRequest(tasks=(task,), configs=experiment.configs, model=experiment.spec.model, limit=limit)
        (shard,) = make_shards(experiment, request, 1, share_machine=True)
        refuse_beside_others(shard.results)
        shard.run(progress or (lambda config, done, total: None), loaded=model.network)
        found = _read(experiment, task, limit, with_documents=False)
        return Comparison(experiment, found, task, limit, kept)


def _content(
    model: Model,
    task: str,
    configs: Mapping[str, Config],
    baseline: str | None,
    batch_size: int | None,
) -> dict[str, Any]:
    """Returns the content of the experiment's file."""
    from stepsaver.bench.experiment import REFERENCE, ExperimentSpec

    if not isinstance(configs, Mapping):
        raise UsageError(f"configs {shown(configs)} is no mapping of names to rules, recipes or fields of a config")
    if not configs:
        raise UsageError("there is nothing to compare: no configs were given")
    for name in configs:
        checked_text(name if isinstance(name, str) else "", "configs")
        if not isinstance(name, str):
            raise UsageError(f"configs: {shown(name)} is no name")
    opened, fields = model.opened, ExperimentSpec.model_fields
    if opened.decoding.stop_ids != opened.config.stop_ids:
        raise UsageError("a comparison ends texts at the model's own stop tokens; load it without stop_ids")
    found = [_config(name, given) for name, given in configs.items()]
    if not any(str(each.get("decode")).startswith(REFERENCE) for each in found) and REFERENCE not in configs:
        found.append({"name": REFERENCE, "decode": REFERENCE})
    return {
        "question": f"Which of {', '.join(configs)} is fast on {task}, and how accurate?",
        "tasks": [task],
        "configs": found,
        "baseline": next(iter(configs)) if baseline is None else baseline,
        "success": SUCCESS,
        "model": str(opened.folder.resolve()) if opened.name != "embedded" else opened.name,
        "batch_size": batch_size or fields["batch_size"].default,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "weights": opened.weights,
        "device": str(opened.device),
        "decoding": {"policy": opened.policy}
        | {
            name: getattr(opened.decoding, name)
            for name in ("block_size", "sub_block_size", "mask_id", "prefix_cache", "block_cache")
        },
    }


def _config(name: str, given: Config) -> dict[str, Any]:
    if isinstance(given, os.PathLike):
        given = {"recipe": given}
    fields: dict[str, Any] = {**given} if isinstance(given, Mapping) else {"rules": given}
    if "recipe" in fields:
        from stepsaver.evaluation.recipe import read_recipe

        twice = next((each for each in (*FROM_RECIPE, "threshold") if each in fields), None)
        if twice is not None:
            raise UsageError(f"config {shown(name)}: a recipe settles {twice}; leave it out")
        fields |= read_recipe(recipe_path(fields.pop("recipe"))).model_dump(include=set(FROM_RECIPE), exclude_none=True)
    rules = chosen_rules(fields.pop("rules", ()))
    policy, decode = fields.pop("policy", None), fields.pop("decode", None)
    policy = policy if policy is None or isinstance(policy, str) else chosen_policy(policy, None)
    for each in [*rules, *([] if policy is None or isinstance(policy, str) else [policy])]:
        registry.adopt(type(each), "rules" if isinstance(each, Rule) else "policies")
    texts: dict[str, Any] = {"rules": [registry.describe(rule) for rule in rules]} if rules else {}
    if policy is not None:
        texts["policy"] = policy if isinstance(policy, str) else registry.describe(policy)
    if decode is not None:
        texts["decode"] = decode.text if isinstance(decode, Decoder) else decode
    return {"name": name, **texts, **{key: _plain(value) for key, value in fields.items()}}


def _plain(value: Any) -> Any:
    """Mappings and numbers of any class as a file can hold them."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return value if not is_number else int(value) if isinstance(value, Integral) else float(value)


def _folder(given: object) -> Path:
    try:
        return Path(given)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"folder {shown(given)} is not the path of a folder") from None


def _without_file(message: str, folder: Path, names: Sequence[str]) -> str:
    """A complaint about the experiment's file as one about the call: no path, no lines, configs by their names."""
    message = re.sub(rf"{re.escape(str(folder))}\S*:? (line \d+: )?", "", message)
    message = re.sub(r"; line \d+: ", "; ", message)
    return re.sub(r"configs\.(\d+)\.?", lambda found: f"config {names[int(found[1])]!r}: ", message)


def _write_experiment(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the experiment's file, unless there is one that `compare` did not write."""
    import yaml

    from stepsaver.bench.experiment_file import FILE

    path = folder / FILE
    try:
        text = yaml.safe_dump(dict(content), sort_keys=False)
    except Exception as error:  # a value of somebody else's class may raise anything
        raise UsageError(f"a config holds what no file can: {shown(error)}") from None
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(FIRST_LINE):
            raise UsageError(f"{path} is an experiment of its own; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(FIRST_LINE + text, encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"folder {shown(str(folder))}: nothing can be written there ({error})") from None


def _read(experiment: "Experiment", task: str, limit: int | None, *, with_documents: bool) -> "ReportTask":
    from stepsaver.bench.folders import results_folder
    from stepsaver.report.artifacts import read_stored_task

    model = experiment.spec.model
    found = read_stored_task(
        experiment,
        results_folder(experiment, model),
        task,
        limit=limit,
        model=model,
        with_documents=with_documents,
    )
    if found is None:
        raise UsageError(f"{experiment.folder} has no results of {shown(task)} any more")
    return found


def _columns(config: ComparedConfig) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in ("name", "outcome"):
            columns[name] = value
            continue
        value, low, high = (None, None, None) if value is None or isnan(value.value) else value
        columns |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return columns
