"""`stepsaver report`: the table, the verdict and the audit of an experiment, and its page; or the index of all."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from stepsaver.commands._experiment_options import Chosen, choose, chosen_tasks, with_decoding
from stepsaver.commands._model_options import add_checkpoint_arguments
from stepsaver.commands._outputs import check_output_file, check_output_folder
from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.bench.experiment import Experiment
    from stepsaver.report.cells import ReportTask
    from stepsaver.report.comparison import Other
    from stepsaver.report.experiment_page import TraceLink
    from stepsaver.report.published_numbers import PublishedNumbers

WHEN_STOPPED = "no file is half written; the same command starts again"
HELP = "the verdict, the table and the audit of an experiment, and its page; without a name, an index of all"
TEXTS = ("csv", "latex", "leaderboard")  # files beside the page
OF_ONE = (
    "check", "json", "compare", "figures", "against", *TEXTS, "trace_samples", "trace_config", "save_artifacts"
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", nargs="?", metavar="EXPERIMENT", help="default: an index of all, RESULTS.md and STATUS.md"
    )
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="results of runs with this limit")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")
    parser.add_argument(
        "--check",
        action="store_true",
        help="audit everything that is stored, unfinished configs too, and write no page; exit code 1 if anything is"
        " invalid",
    )
    parser.add_argument("--wide", action="store_true", help="print all columns, not those that fit 80 characters")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and write no page")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="a task's documents as local files")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page (default: report.html in the experiment)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV, too")
    parser.add_argument("--latex", type=Path, metavar="FILE", help="write the table as LaTeX, too")
    parser.add_argument(
        "--leaderboard", type=Path, metavar="FILE", help="write tokens per forward and accuracy as d3LLM's YAML file"
    )
    parser.add_argument(
        "--against", metavar="CONFIG", help="print a paired test of every other config against this one"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the figures as PDF and PNG, too")
    parser.add_argument(
        "--compare",
        metavar="OTHER",
        help="put another experiment, another model's results, a run id under previous/, or `previous` beside it;"
        " `source` or `d3llm`: numbers that others published, with what is wrong with them",
    )
    parser.add_argument(
        "--trace-samples",
        type=int,
        metavar="N",
        help="decode the first N samples again with the baseline and another config; the sample browser links to a page"
        " that plays them step by step",
    )
    parser.add_argument("--trace-config", metavar="C", help="the other config (default: the fastest)")
    add_checkpoint_arguments(parser.add_argument_group("what the files of a traced model leave open"))
    parser.add_argument(
        "--save-artifacts",
        action="store_true",
        help="copy the summaries of a complete run to artifacts/, committed, and used where results/ is missing",
    )


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")
    if options.experiment is None:
        return _report_all(options)
    return _print_stored(options) if options.check or options.json else _report_one(options)


def _print_stored(options: argparse.Namespace) -> int:
    """Prints what is stored, else what is committed, audited as it is. Nothing is written."""
    from stepsaver.report.cells import read_audited_task

    chosen = choose(options)
    read = (
        read_audited_task(chosen.experiment, chosen.results, folder) or chosen.artifacts(folder)
        for folder in chosen.cell_folders.values()
    )
    tasks = [task for task in read if task is not None]
    if not tasks:
        raise chosen.nothing_there()
    if options.json:
        print(json.dumps({task.folder: _as_json(task) for task in tasks}))
    else:
        print_tasks(tasks, is_wide=options.wide)
    is_invalid = any(finding.level == "invalid" for task in tasks for finding in task.findings)
    return int(options.check and is_invalid)


def _as_json(task: "ReportTask") -> dict[str, object]:
    findings = [asdict(finding) for finding in task.findings]
    unfinished = {cell.name: cell.note for cell in task.unfinished}
    return {**asdict(task.verdict()), "source": task.source, "findings": findings, "unfinished": unfinished}


def print_tasks(tasks: "Sequence[ReportTask]", *, is_wide: bool = False) -> None:
    """Prints each task's table, its verdict and what the audit found."""
    from stepsaver.bench.audit import timed_again_by
    from stepsaver.report.blocks import TERMINAL
    from stepsaver.report.tables import result_text

    def say(text: object) -> None:
        print(text if is_wide else fill(str(text), TERMINAL, subsequent_indent="  ", break_long_words=False))

    for task in tasks:
        source = ", from artifacts: audited when they were saved" if task.source == "artifacts" else ""
        samples = f", {task.summaries[0].samples:,} samples" if task.done else ""
        print(f"{task.experiment.name}, {task.folder}{samples}{source}\n")
        if task.done:
            print(result_text(task.summaries, task.verdict(), is_wide=is_wide))
            print()
            say(task.verdict().sentence)
        for cell in task.unfinished:
            say(f"{cell.name}: {cell.note}")
        for finding in task.findings:
            say(finding)
        if command := timed_again_by(task.experiment, task.folder, task.findings):
            say("answers and accuracy stand; what was disturbed is timed again by:")
            print(f"  {command}")
        if not task.findings:
            print("the audit found nothing")
        print()


def _report_one(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import find_experiment
    from stepsaver.evaluation.local_data import require_folder
    from stepsaver.report.artifacts import save_artifacts
    from stepsaver.report.blocks import plain_table, text_rows
    from stepsaver.report.comparison import find_other
    from stepsaver.report.figures import write_paper_figures
    from stepsaver.report.parallelism import leaderboard
    from stepsaver.report.tables import against_table, as_csv, as_latex

    if options.trace_samples is not None and options.trace_samples < 1:
        raise UsageError(f"--trace-samples {options.trace_samples} is not positive")
    experiment = find_experiment(options.experiment)
    page = options.html or experiment.folder / "report.html"
    check_output_file("--html", page)
    for name in TEXTS:
        check_output_file(f"--{name}", getattr(options, name))
    check_output_folder("--figures", options.figures)
    if options.data_dir is not None:
        require_folder(options.data_dir)
    chosen = choose(options)
    published = _published(options, experiment)
    other = find_other(experiment, chosen.results, options.compare) if options.compare and not published else None
    tasks = read_tasks(chosen, limit=options.limit, model=options.model, data_dir=options.data_dir)
    print_tasks(tasks, is_wide=options.wide)
    for task in tasks if options.against else ():
        block = against_table(task, experiment.config(options.against).name)
        print(
            f"{task.folder}, against {options.against}\n\n{plain_table(text_rows(block['rows']), block['columns'])}\n"
        )
    if options.save_artifacts:
        for task in tasks:
            print(save_artifacts(task))
    for name, made in zip(TEXTS, (as_csv, as_latex, leaderboard), strict=True):
        if path := getattr(options, name):
            _write(path, made(tasks))
    if options.figures:
        for path in write_paper_figures(tasks, options.figures):
            print(path)
    traces = _trace(options, experiment, tasks, page) if options.trace_samples else {}
    there = {task.summaries[0].task for task in tasks}
    write_report(
        experiment,
        tasks,
        page=page,
        results_page=experiment.folder / "results.md",
        other=other,
        published=published,
        traces=traces,
        unfinished=[task for task in chosen.cell_folders if task not in there],
    )
    return 0


def _published(options: argparse.Namespace, experiment: "Experiment") -> "PublishedNumbers | None":
    """Returns the published numbers that `--compare` names, or None if it names something else."""
    from stepsaver.report.published_numbers import published_names, read_published

    if options.compare not in published_names():
        return None
    found, tasks = read_published(options.compare), chosen_tasks(options, experiment)
    if not any(map(found.benchmarks_of, tasks)):
        raise UsageError(
            f"--compare {options.compare} has numbers of {', '.join(found.tasks)}, none of {', '.join(tasks)}"
        )
    return found


def read_tasks(chosen: Chosen, *, limit: int | None, model: str | None, data_dir: Path | None) -> "list[ReportTask]":
    """Returns the tasks that have results, or else artifacts."""
    from stepsaver.report.artifacts import read_stored_task

    experiment = chosen.experiment
    tasks = [
        read_stored_task(
            experiment, chosen.results, task, limit=limit, model=model or experiment.spec.model, data_dir=data_dir
        )
        for task in chosen.cell_folders
    ]
    found = [task for task in tasks if task is not None]
    if not found:
        raise chosen.nothing_there()
    return found


def write_report(
    experiment: "Experiment",
    tasks: "list[ReportTask]",
    *,
    page: Path,
    results_page: Path,
    other: "Other | None" = None,
    published: "PublishedNumbers | None" = None,
    traces: "dict[str, TraceLink] | None" = None,
    unfinished: Sequence[str] = (),
) -> None:
    """Writes the page and the tables, and says where they are."""
    from stepsaver.report.experiment_page import experiment_page
    from stepsaver.report.results_page import update_results

    others = {task.folder: other.read(task.folder, task.documents) for task in tasks} if other else {}
    if other and not any(others.values()):
        raise UsageError(f"{other.name} has no results of {', '.join(others)} to compare with")
    other_name = other.name if other else ""
    content = experiment_page(
        experiment,
        tasks,
        others=others,
        other_name=other_name,
        published=published,
        traces=traces,
        unfinished=unfinished,
    )
    print(update_results(experiment, tasks, results_page, published=published))
    _write(page, content)


def _write(path: Path, content: str) -> None:
    from stepsaver.bench.durable import write_beside

    write_beside(path, content)
    print(path)


def _trace(
    options: argparse.Namespace, experiment: "Experiment", tasks: "list[ReportTask]", page: Path
) -> "dict[str, TraceLink]":
    """Writes a page per generative task beside the report, and returns the links to them."""
    from stepsaver.bench.session import open_session
    from stepsaver.report.experiment_page import TraceLink
    from stepsaver.report.traced_samples import config_to_trace, write_traces

    experiment = with_decoding(experiment, options)
    session = open_session(experiment, model_name=options.model or experiment.spec.model)
    links = {}
    for task in tasks:
        config = config_to_trace(task, options.trace_config)
        path = page.parent / "traces" / f"{task.folder}.html"
        traced = write_traces(session, task, config, count=options.trace_samples, path=path)
        if traced is not None:
            print(traced.path)
            links[task.folder] = TraceLink(f"traces/{path.name}", traced.label, traced.documents)
    return links


def _report_all(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import experiments_folder
    from stepsaver.report.overview import index_text, overview_page, read_overview, results_document, status_document

    given = [f"--{name.replace('_', '-')}" for name in OF_ONE if getattr(options, name)]
    if given:
        raise UsageError(f"{given[0]} needs the name of an experiment")
    folder = experiments_folder()
    page = options.html or folder / "report.html"
    check_output_file("--html", page)
    overview = read_overview(limit=options.limit, tasks=options.task, model=options.model)
    print(f"{index_text(overview, is_wide=options.wide)}\n")
    _write(page, overview_page(overview))
    _write(folder / "RESULTS.md", results_document(overview))
    _write(folder / "STATUS.md", status_document(overview))
    return 0
