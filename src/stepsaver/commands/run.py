"""`stepsaver run`: runs what is missing of an experiment, prints the table and the verdict."""

import argparse
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stepsaver.commands._dry_run import print_dry_run
from stepsaver.commands._experiment_options import Chosen, add_cell_arguments, choose, with_decoding
from stepsaver.commands._model_options import add_checkpoint_arguments, add_curve_argument, given_curve
from stepsaver.commands._progress import counting_progress
from stepsaver.commands._run_settings import add_setting_arguments, with_recipe, with_settings
from stepsaver.engine.errors import UsageError, shown

if TYPE_CHECKING:
    from stepsaver.bench.documents import Summary
    from stepsaver.bench.experiment import Experiment, Resources
    from stepsaver.bench.run import RunRequest, Shard

WHEN_STOPPED = "every finished chunk is stored, and the same command goes on from there"
HELP = "run what is missing of an experiment"
RESOURCES = {"partition": str, "account": str, "gres": str, "minutes": int, "cpus": int, "memory_gb": int}
COUNTED = ("minutes", "cpus", "memory_gb", "shards", "repeats", "assume_tokens", "assume_rate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cell_arguments(parser)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="only these configs (default: all)")
    parser.add_argument(
        "--force", action="store_true", help="set aside what is stored of the chosen configs, run again"
    )
    parser.add_argument("--why", metavar="TEXT", help="with --force: what is wrong with them; stays on record")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="time everything N times, each time in a fresh process; what is timed already is not timed again",
    )
    parser.add_argument(
        "--repeat-disturbed",
        action="store_true",
        help="time chunks again in which a config was under half of its median rate and a config beside it was not",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be run and its cost; write nothing")
    parser.add_argument("--assume-tokens", type=int, metavar="N", help="of a generated answer, for --dry-run")
    parser.add_argument("--assume-rate", type=float, metavar="X", help="tokens per second, for --dry-run")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="local files instead of the hub")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run the model's code")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_checkpoint_arguments(parser.add_argument_group("what the model's files leave open"))
    add_setting_arguments(parser)
    add_curve_argument(parser)
    where = parser.add_argument_group("where it runs")
    where.add_argument("--runner", default="local", metavar="R", help="local or slurm (default: %(default)s)")
    where.add_argument("--shards", type=int, default=1, metavar="N", help="processes or jobs, each with its chunks")
    where.add_argument("--shard", metavar="I/N", help="only the I-th of N shares of the chunks, on its own machine")
    for name, kind in RESOURCES.items():
        where.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help="of a SLURM job (default: the file's resources)"
        )
    where.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of sbatch, such as qos=long, constraint=turing or exclusive; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness draws bars of its own, also where there is no terminal
    from stepsaver.bench.dry_run import ASSUMED_TOKENS, Assumed, estimate_run
    from stepsaver.bench.folders import logs_folder
    from stepsaver.bench.jobs import job_states, refuse_beside_jobs
    from stepsaver.bench.run import make_shards, refuse_beside_others
    from stepsaver.bench.runners import find_runner

    chosen = choose(options)
    experiment = with_settings(with_decoding(chosen.experiment, options), options)
    chosen = chosen._replace(experiment=with_recipe(experiment, options))
    experiment, logs = chosen.experiment, logs_folder(chosen.experiment)
    for name in COUNTED:
        if (given := getattr(options, name)) is not None and given <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {given} is not positive")
    if options.repeats > 1 and options.shards > 1 and options.runner == "local":
        raise UsageError("--repeats is for timings, and shards that share a machine give none: leave --shards out")
    runner, resources = find_runner(options.runner), _resources(options, experiment.spec.resources)
    share, request, left_out = _share(options), request_of(options, chosen), 0
    if len(request.tasks) > 1:
        request = without_unloadable(experiment, request)
        left_out = len(chosen.cell_folders) - len(request.tasks)
        chosen = chosen._replace(cell_folders={task: chosen.cell_folders[task] for task in request.tasks})
    say_remarks(experiment)
    if options.dry_run:
        assumed = Assumed(options.assume_tokens or ASSUMED_TOKENS, options.assume_rate)
        print_dry_run(estimate_run(experiment, request, assumed), shards=options.shards, as_json=options.json)
        return 0
    refuse_beside_jobs(logs, chosen.results)
    if share is not None:
        index, count = share
        return _run_share(make_shards(experiment, request, count, share_machine=False)[index - 1], chosen)
    refuse_beside_others(chosen.results)
    shards = make_shards(experiment, request, options.shards, share_machine=options.runner == "local")
    with counting_progress("running") as progress:
        is_done = runner.launch(shards, logs, resources, progress)
    if is_done:
        return show_results(chosen, request, as_json=options.json) or int(left_out > 0)
    job = job_states(logs)[-1]
    print(json.dumps({"job": job.job, "shards": job.shards}) if options.json else f"submitted {job}\nlogs: {logs}")
    return int(left_out > 0)


def _share(options: argparse.Namespace) -> tuple[int, int] | None:
    """Returns which share of how many is to be run here."""
    if options.shard is None:
        return None
    numbers = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", options.shard)
    if not numbers or int(numbers[1]) > int(numbers[2]):
        raise UsageError(f"--shard {shown(options.shard)} is no share such as 2/8")
    if options.force or options.shards > 1 or options.runner != "local":
        raise UsageError("--shard is one share, run here: without --force, --shards and --runner")
    return int(numbers[1]), int(numbers[2])


def _run_share(shard: "Shard", chosen: Chosen) -> int:
    from stepsaver.bench.folders import logs_folder
    from stepsaver.bench.runners.local import run_repeats

    with counting_progress("running") as progress:
        complete = run_repeats(shard, logs_folder(chosen.experiment), progress)
    if set(complete) == set(chosen.cell_folders.values()):
        return show_results(chosen, shard.request)
    print(f"share {shard.index + 1} of {shard.count} is stored; the one that ends last writes the results")
    return 0


def _resources(options: argparse.Namespace, stored: "Resources") -> "Resources":
    """Returns the file's resources, with what was given on the command line."""
    from pydantic import ValidationError

    given = {name: getattr(options, name) for name in RESOURCES if getattr(options, name) is not None}
    free = {name: value if equals else True for name, equals, value in (text.partition("=") for text in options.slurm)}
    if (given or free) and options.runner == "local":
        name = next(iter(given), "slurm").replace("_", "-")
        raise UsageError(f"--{name} is for jobs; the local runner takes no resources")
    try:
        return stored.model_validate(stored.model_dump() | given | {"slurm": stored.slurm | free})
    except ValidationError as error:
        raise UsageError(f"--slurm: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def request_of(options: argparse.Namespace, chosen: Chosen) -> "RunRequest":
    from stepsaver.bench.run import RunRequest
    from stepsaver.evaluation.local_data import require_folder

    experiment = chosen.experiment
    if options.why is not None and not (options.force and options.why.strip()):
        raise UsageError("--why belongs to --force and says what is wrong with the results that it sets aside")
    return RunRequest(
        tasks=tuple(chosen.cell_folders),
        configs=tuple(map(experiment.config, options.configs)) or experiment.configs,
        model=options.model or experiment.spec.model,
        limit=options.limit,
        force=options.force,
        why=options.why or "",
        repeats=options.repeats,
        repeat_disturbed=options.repeat_disturbed,
        curve=given_curve(options),
        data_dir=options.data_dir and require_folder(options.data_dir).resolve(),
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )


def without_unloadable(experiment: "Experiment", request: "RunRequest") -> "RunRequest":
    """Returns the request without tasks that cannot be loaded here, each of which is said: one of them (a dataset whose
    terms were not accepted, no sandbox) does not end the others. Raises if none is left.
    """
    from stepsaver.bench.run import load

    there, problems = [], []
    for task in request.tasks:
        try:
            load(task, experiment, request)
            there.append(task)
        except UsageError as error:
            problems.append(error)
            print(f"note: {task} is left out: {error}", file=sys.stderr)
    if not there:
        raise problems[0]
    return replace(request, tasks=tuple(there))


def run_here(chosen: Chosen, request: "RunRequest") -> int:
    """Runs what is missing in this process and shows the results. The experiment need not be in a file."""
    from stepsaver.bench.folders import logs_folder
    from stepsaver.bench.jobs import refuse_beside_jobs
    from stepsaver.bench.run import make_shards, refuse_beside_others

    say_remarks(chosen.experiment)
    refuse_beside_jobs(logs_folder(chosen.experiment), chosen.results)
    refuse_beside_others(chosen.results)
    (shard,) = make_shards(chosen.experiment, request, 1, share_machine=True)
    with counting_progress("running") as progress:
        shard.run(progress)
    return show_results(chosen, request)


def say_remarks(experiment: "Experiment") -> None:
    for remark in experiment.remarks:
        print(f"note: {remark}", file=sys.stderr)


def show_results(chosen: Chosen, request: "RunRequest", *, as_json: bool = False) -> int:
    from stepsaver.bench.folders import read_summaries
    from stepsaver.bench.run import with_baselines
    from stepsaver.bench.verdict import judge
    from stepsaver.report.tables import result_text

    experiment = chosen.experiment
    found: dict[str, list[Summary]] = {}
    for task, folder in chosen.cell_folders.items():
        stored = read_summaries(experiment, chosen.results, folder)
        found[task] = [stored[config.name] for config in with_baselines(experiment, request.configs, task)]
    if as_json:
        print(json.dumps({task: [each.as_json() for each in summaries] for task, summaries in found.items()}))
        return _audit(chosen, sys.stderr)
    for task, summaries in found.items():
        verdict = judge(summaries, experiment.success_of)
        print(f"\n{experiment.name}, {task}, {summaries[0].samples} samples: {experiment.spec.question}\n")
        print(result_text(summaries, verdict))
        for line in [*_inert_lines(summaries), *_timing_lines(summaries)]:
            print(line)
        print(f"\n{verdict.sentence}")
    return _audit(chosen, sys.stdout)


def _inert_lines(summaries: "list[Summary]") -> list[str]:
    """Returns the configs whose rules cannot act on the task, by name and with the reason."""
    return [
        f"inert: {summary.config}: {each.rule}: {each.reason}"
        + (f"; taken over from {summary.equal_to}" if summary.equal_to else "")
        for summary in summaries
        for each in summary.inert_rules
    ]


def _timing_lines(summaries: "list[Summary]") -> list[str]:
    """Returns what one should know about the timings, and which timing counts of chunks that were timed twice."""
    from stepsaver.report.tables import timed_again

    shared = [summary.config for summary in summaries if summary.chunks_not_comparable]
    return [
        *(["timings of concurrent shards on one machine: they enter no speed-up"] if shared else []),
        *(f"{summary.config}: {timed_again(each)}" for summary in summaries for each in summary.timed_again),
    ]


def _audit(chosen: Chosen, stream: TextIO) -> int:
    """Prints what is wrong with the results, at the end of every run, and returns the exit code."""
    from stepsaver.bench.audit import audit, read_evidence, timed_again_by

    is_invalid = False
    for folder in chosen.cell_folders.values():
        findings = audit(read_evidence(chosen.experiment, chosen.results, folder))
        for finding in findings:
            print(finding, file=stream)
            is_invalid |= finding.level == "invalid"
        if command := timed_again_by(chosen.experiment, folder, findings):
            print(f"answers and accuracy stand; what was disturbed is timed again by: {command}", file=stream)
    return 1 if is_invalid else 0
