"""`stepsaver tune`: the fastest settings that keep the answers, for a model, a task and a batch size."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.commands._json_lines import read_json_lines, text_of
from stepsaver.commands._outputs import check_output_file, check_output_folder
from stepsaver.commands._progress import budget_progress
from stepsaver.engine.defaults import NEW_TOKENS, WEIGHTS
from stepsaver.engine.errors import UsageError, shown

if TYPE_CHECKING:
    from stepsaver.bench.experiment import Experiment
    from stepsaver.bench.session import Session
    from stepsaver.tune.problems import SplitProblems
    from stepsaver.tune.tuning import Aim, Tuning

WHEN_STOPPED = "every finished chunk and every attempt is stored, and the same command goes on from there"
HELP = "find the fastest settings that keep the answers"
RECIPE, PAGE, RECORD = "recipe.yaml", "tuning.html", "tuning.json"
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
MOST_SECONDS = 30 * 24 * 3600.0
MOST_BATCH = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="a checkpoint folder, a hub id, or `embedded`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", metavar="T", help="a task with labels")
    source.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help='{"prompt": "..."}: agreement with plain decoding'
    )
    parser.add_argument("--max-drop", type=float, required=True, metavar="POINTS", help="of accuracy, or of agreement")
    parser.add_argument("--batch-size", type=int, required=True, metavar="N", help="samples decoded together")
    parser.add_argument("--budget", default="30min", metavar="TIME", help="such as 90s, 30min or 2h (default: 30min)")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the experiment's folder (default: by what is tuned)")
    parser.add_argument("--recipe-out", type=Path, metavar="FILE", help="also write the recipe there")
    parser.add_argument("--dry-run", action="store_true", help="say what would be tried and how long; run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="local files instead of the hub")
    parser.add_argument("--metric", metavar="M", help="what counts as accuracy, `metric,filter` of lm-eval's results")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float64, bfloat16 or float16")
    parser.add_argument("--weights", default=WEIGHTS, help="on a CPU: auto, float32 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    without = parser.add_argument_group("prompts without labels")
    without.add_argument("--answer", metavar="REGEX", help="what the final answer is in a text")
    without.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help="(default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")
    from stepsaver.bench.durable import exclusive
    from stepsaver.bench.session import open_session
    from stepsaver.tune.tuning import Tuning

    aim = _aim(options)
    check_output_file("--recipe-out", options.recipe_out)
    experiment = _experiment(options, aim)
    prompts = _read_prompts(options)
    tasks = _load_tasks(options)
    if options.dry_run:
        session = open_session(experiment, model_name=options.model, has_weights=False)
        _print_plan(session, _problems(options, experiment, session, tasks, prompts), aim)
        return 0
    folder = experiment.folder.resolve()
    made = next((each for each in reversed([folder, *folder.parents]) if not each.exists()), None)
    check_output_folder("--out", folder)
    with exclusive(folder / "results"):
        try:
            session = open_session(experiment, model_name=options.model)
            problems = _problems(options, experiment, session, tasks, prompts)
            with budget_progress("tuning", aim.budget) as report:
                tuning = Tuning(experiment, session, problems, aim, report)
                document = tuning.run()
        except UsageError:  # nothing was decided: nothing stays
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise
    return _show(options, tuning, document)


def _aim(options: argparse.Namespace) -> "Aim":
    from stepsaver.tune.tuning import Aim

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", options.budget.strip())
    if not found or found[2] not in UNITS or not 0 < float(found[1]) * UNITS[found[2]] <= MOST_SECONDS:
        raise UsageError(f"--budget {shown(options.budget)} is no time such as 90s, 30min or 2h")
    if not 0 < options.max_drop < 100:
        raise UsageError(f"--max-drop {options.max_drop} is not between 0 and 100 points")
    if not 0.5 <= options.confidence < 1:
        raise UsageError(f"--confidence {options.confidence} is not from 0.5 to below 1")
    if not 1 <= options.batch_size <= MOST_BATCH:
        raise UsageError(f"batch size {shown(options.batch_size)} is not from 1 to {MOST_BATCH}")
    if options.answer is not None and options.prompts is None:
        raise UsageError("--answer is for --prompts; a task has its own way to find an answer")
    return Aim(options.max_drop, options.confidence, float(found[1]) * UNITS[found[2]])


def _experiment(options: argparse.Namespace, aim: "Aim") -> "Experiment":
    """The tuning's experiment: plain decoding at the reference's settings, and no candidate yet."""
    from stepsaver.bench.experiment import Experiment, ExperimentSpec
    from stepsaver.bench.folders import experiments_folder
    from stepsaver.tune.problems import chunk_samples
    from stepsaver.tune.trials import BASELINE, REFERENCE

    task = options.task or re.sub(r"[^\w.+-]", "_", options.prompts.stem).lstrip("_.+-") or "prompts"
    model = re.sub(r"[^\w.-]", "_", Path(options.model).name)
    name = f"tune_{model}_{task}_batch_{options.batch_size}_drop_{aim.max_drop:g}"
    content = {
        "question": f"What decodes {task} fastest at batch size {options.batch_size} within {aim.max_drop:g} points?",
        "tasks": [task],
        "configs": [{"name": BASELINE}, {"name": REFERENCE, "decode": REFERENCE}],
        "baseline": BASELINE,
        "success": {
            "confirm_if": {"speed_up": "> 1", "drop_points": f"< {aim.max_drop:.10f}".rstrip("0").rstrip(".")},
            "reject_if": {"speed_up": "< 1", "drop_points": "> 100"},
        },
        "batch_size_elsewhere": options.batch_size,
        "chunk_samples": chunk_samples(options.batch_size),
        "data_dir": options.data_dir and options.data_dir.resolve(),
    }
    given = {each: getattr(options, each) for each in ("model", "batch_size", "dtype", "weights", "device", "metric")}
    spec = ExperimentSpec.model_validate(content | given)
    assert isinstance(spec.configs, list)
    return Experiment(options.out or experiments_folder() / name, spec, tuple(spec.configs), ())


def _read_prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return []
    lines = read_json_lines(options.prompts)
    return [text_of(entry, "prompt", f"{options.prompts} line {number}") for number, entry in lines]


def _load_tasks(options: argparse.Namespace) -> list[Any]:
    """The task to search on, and the one that it declares for confirming."""
    from stepsaver.evaluation.task_loading import TaskOptions, load_task
    from stepsaver.evaluation.task_registry import find_declaration

    if options.task is None:
        return []
    declaration = find_declaration(options.task)
    fresh = declaration.fresh_problems if declaration and options.data_dir is None else None
    wanted = TaskOptions(data_dir=options.data_dir, metric=options.metric)
    return [load_task(name, wanted) for name in (options.task, fresh) if name]


def _problems(
    options: argparse.Namespace, experiment: "Experiment", session: "Session", tasks: list[Any], prompts: list[str]
) -> "SplitProblems":
    from stepsaver.tune.agreement import answer_pattern
    from stepsaver.tune.problems import prompt_problems, task_problems

    if tasks:
        return task_problems(experiment, session, tasks[0], tasks[1] if len(tasks) > 1 else None)
    tokenizer = session.tokenizer
    if tokenizer.has_chat_template:
        prompts = [tokenizer.chat_prompt([{"role": "user", "content": text}]) for text in prompts]
    pattern = answer_pattern(options.answer)
    return prompt_problems(experiment, session, prompts, max_new_tokens=options.max_new_tokens, pattern=pattern)


def _print_plan(session: "Session", problems: "SplitProblems", aim: "Aim") -> None:
    from stepsaver.bench.statistics import fewest_samples
    from stepsaver.tune.tuning import SHARE_OF_SEARCH, space_of

    space = space_of(session, problems)
    names = space.singles()
    print(f"{len(names)} single changes, and combinations of those that pay:")
    for name in names:
        print(f"  {name}")
    search, fresh = problems.search, problems.fresh
    minutes = aim.budget / 60
    print(f"search: {search.count} problems of {search.task_run.task.name}, {SHARE_OF_SEARCH * minutes:.1f} min")
    print(f"confirm: {fresh.count} fresh problems of {fresh.task_run.task.name}, the rest of {minutes:.1f} min")
    least = fewest_samples(aim.limit, aim.confidence)
    print(f"a drop below {aim.max_drop:g} points at {100 * aim.confidence:g} % needs at least {least} fresh problems")
    if search.measure == "agreement":
        print(f"no labels: the drop is one of agreement with plain decoding ({search.task_run.task.accuracy})")


def _show(options: argparse.Namespace, tuning: "Tuning", document: dict[str, Any]) -> int:
    from stepsaver.bench.durable import write_beside
    from stepsaver.evaluation.recipe import Recipe, recipe_text
    from stepsaver.report.tuning_page import confirmed_parallelism, parallelism_line, tuning_page
    from stepsaver.tune.trials import BASELINE

    folder, recipe = tuning.experiment.folder, document["recipe"]
    winner = next((each["name"] for each in document["attempts"] if each["outcome"] == "confirmed"), BASELINE)
    fresh = tuning.problems.fresh
    results, chunks = tuning.results / fresh.task_run.folder_name, [chunk.number for chunk in fresh.chunks]
    document["parallelism"] = confirmed_parallelism(results, (BASELINE, winner), chunks) if recipe else []
    write_beside(folder / RECORD, json.dumps(document, indent=1) + "\n")
    write_beside(folder / PAGE, tuning_page(document))
    line = parallelism_line(document)
    for path in filter(None, (folder / RECIPE, options.recipe_out)) if recipe else ():
        write_beside(path, recipe_text(Recipe.model_validate(recipe)) + (f"# {line}\n" if line else ""))
    said = [*outcome_lines(document), "", document["sentence"]]
    said += [f"recipe: {options.recipe_out or folder / RECIPE}"] if recipe else []
    print(json.dumps(document) if options.json else "\n".join([*said, f"page: {folder / PAGE}"]))
    return 0


def outcome_lines(document: dict[str, Any]) -> list[str]:
    """The most promising candidates of the search, the attempts at confirming, and the winner's tokens per forward."""
    from stepsaver.report.tuning_page import drop_name, parallelism_line

    of = drop_name(document)
    lines = [f"searched {len(document['candidates'])} candidates in {document['seconds']:.0f} s; most promising:"]
    best = [each for each in document["candidates"] if each["rank"] is not None]
    for each in sorted(best, key=lambda one: one["rank"]):
        up, drop = each["speed_up"][0], each["drop_points"][0]
        lines.append(f"  {each['name']}: {up:.2f}x, {of} {drop:+.1f} points on {each['problems']} problems")
    for each in document["attempts"]:
        line = f"attempt {each['number']}, {each['name']}: {each['outcome']}"
        if each["outcome"] != "begun":
            up, drop = _said(each["speed_up"], ".2f", "x"), _said([100 * bound for bound in each["drop"]], "+.2f", "")
            line += f": {up}, {of} {drop} points on {each['problems']} fresh problems"
        lines.append(line)
    return [*lines, *filter(None, [parallelism_line(document)])]


def _said(values: list[float], form: str, unit: str) -> str:
    """A value with its interval, if it has one."""
    value, *bounds = (format(each, form) for each in values)
    return f"{value}{unit} [{', '.join(bounds)}]" if bounds else f"{value}{unit}"
