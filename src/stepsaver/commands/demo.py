"""`stepsaver demo`: the main job on the embedded default, and what to use instead.

The 3x3 grid of `00_baseline` on word problems; then the ways that pay, against the same baseline on the same problems.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stepsaver.commands import report as report_command
from stepsaver.commands import run as run_command
from stepsaver.commands._experiment_options import Chosen, chosen_of

if TYPE_CHECKING:
    from stepsaver.bench.experiment import Condition, ConfigSpec, Experiment
    from stepsaver.bench.run import RunRequest
    from stepsaver.bench.verdict import ConfigVerdict

WHEN_STOPPED = run_command.WHEN_STOPPED
HELP = "the main job on the embedded default: the 3x3 grid of layer reuse on word problems, and what to use instead"
EXPERIMENT, TASK = "00_baseline", "mini_gsm8k"
WAYS_THAT_PAY = (
    ("05_suffix_dropout", "window_trim_near_light"),
    ("06_batch_1", "verified_16"),
)  # experiment and config
QUESTION = "Do the ways that pay, against the same baseline?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=512, metavar="N", help="how many problems (default: 512)")


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness draws bars of its own
    from stepsaver.bench.folders import find_experiment

    grid = chosen_of(find_experiment(EXPERIMENT), [TASK], limit=options.limit)
    better = grid._replace(experiment=ways_that_pay(grid.experiment))
    for each in (grid, better):
        run_command.run_here(each, _everything(each, options.limit))
    wanted = grid.experiment.spec.success.confirm_if.drop_points
    print("\n" + advice(_judged(grid), _judged(better), wanted, better.experiment.configs))
    _report(grid, options.limit)
    return 0  # what the audit finds is printed; a busy machine is no reason for a demonstration to fail


def _everything(chosen: Chosen, limit: int) -> "RunRequest":
    """All configs of an experiment, with its own model."""
    from stepsaver.bench.run import RunRequest

    experiment = chosen.experiment
    return RunRequest(tuple(chosen.cell_folders), experiment.configs, experiment.spec.model, limit=limit)


def ways_that_pay(grid: "Experiment") -> "Experiment":
    """Returns an experiment of other experiments' configs, against the grid's baseline and by its criteria."""
    from stepsaver.bench.folders import find_experiment

    configs = [find_experiment(name).config(config) for name, config in WAYS_THAT_PAY]
    baseline = grid.config(grid.spec.baseline)
    return replace(
        grid, configs=(baseline, *configs), spec=grid.spec.model_copy(update={"question": QUESTION}), remarks=()
    )


def _judged(chosen: Chosen) -> "tuple[ConfigVerdict, ...]":
    from stepsaver.bench.folders import read_summaries
    from stepsaver.bench.verdict import judge

    (folder,) = chosen.cell_folders.values()
    summaries = list(read_summaries(chosen.experiment, chosen.results, folder).values())
    return judge(summaries, chosen.experiment.success_of).configs


def advice(
    grid: "Sequence[ConfigVerdict]",
    better: "Sequence[ConfigVerdict]",
    wanted: "Condition",
    configs: "Sequence[ConfigSpec]",
) -> str:
    """Says which config to use by what was measured: the fastest whose drop meets the bound, if it is surely faster."""
    from stepsaver.bench.verdict import figures, surely

    def fastest(judged: "Sequence[ConfigVerdict]") -> "ConfigVerdict | None":
        tried = [each for each in judged if each.outcome != "control"]
        safe = [each for each in tried if surely(each.drop_points, wanted) and each.speed_up.low > 1]
        return max(safe, key=lambda each: each.speed_up.value, default=None)

    best, of_grid = fastest([*grid, *better]), fastest(grid)
    if best is None:
        return f"Use no reuse: nothing was surely faster here at a drop {wanted} points; more problems may tell."
    settings = {each.name: ", ".join(each.settings) for each in configs}
    what = f"{best.config} ({settings[best.config]})" if best.config in settings else best.config
    if of_grid is None:
        other = f"of the grid nothing is surely faster at a drop {wanted} points"
    elif of_grid is best:
        other = "no other way was faster"
    else:
        other = f"the best of the grid is {of_grid.config}, {figures(of_grid)}"
    return f"Use {what}: {figures(best)} against the same baseline; {other}."


def _report(grid: Chosen, limit: int) -> None:
    """Writes the pages to the results, which are not committed: a demonstration changes no file of the repository."""
    tasks = report_command.read_tasks(grid, limit=limit, model=None, data_dir=None)
    folder = grid.results / tasks[0].folder
    print()
    report_command.write_report(grid.experiment, tasks, page=folder / "report.html", results_page=folder / "results.md")
