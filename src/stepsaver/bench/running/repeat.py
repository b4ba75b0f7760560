"""Times disturbed chunks again: the answers have to be the same, both timings stay on record, the later one counts.

The later one counts whatever it says; otherwise repeating would be choosing. Its line in `trace.jsonl` names the
session of the timing that it replaces.
"""

from collections.abc import Mapping

from stepsaver.bench.judging.rates import Slow, slow_chunks
from stepsaver.bench.results.timing import Timing
from stepsaver.bench.running.cell_run import CellRun, Progress, require_stored_answers
from stepsaver.bench.running.task_run import TaskRun


def repeat_disturbed(
    task_run: TaskRun, cells: Mapping[str, CellRun], progress: Progress, *, baseline_of: Mapping[str, str]
) -> None:
    """Times again the chunks in which a config was disturbed, beside its baseline.

    If the baseline was disturbed, all configs that are compared with it are timed again.
    """
    turns: dict[tuple[str, int], list[str]] = {}
    for each in disturbed_chunks(cells):
        turns.setdefault((each.session, each.chunk), []).append(each.config)
    for turn, ((session, chunk), configs) in enumerate(turns.items(), start=1):
        timed = [name for name, cell in cells.items() if _has_timing(cell, session, chunk)]
        replaced = [name for name in timed if name in configs or baseline_of[name] in configs]
        label = f"{task_run.session.identity}.{turn}"  # pairs them with each other, and with no other timing
        names = list(dict.fromkeys([*(baseline_of[name] for name in replaced), *replaced]))
        start = turn % len(names)
        found = {name: _time_again(task_run, cells[name], chunk) for name in names[start:] + names[:start]}
        for name, timing in found.items():  # stored at the end, so that hardly anything can come between a pair
            instead = {"instead_of": session} if name in replaced else {}
            cells[name].stored.append_timing(timing.model_copy(update={"session": label, **instead}))
        progress("timed again", turn, len(turns))


def disturbed_chunks(cells: Mapping[str, CellRun]) -> list[Slow]:
    timings = {name: cell.stored.counting_timings for name, cell in cells.items()}
    return [each for each in slow_chunks(timings) if each.is_disturbed]


def _has_timing(cell: CellRun, session: str, chunk: int) -> bool:
    return any(each.key == (chunk, session) for each in cell.stored.counting_timings)


def _time_again(task_run: TaskRun, cell: CellRun, number: int) -> Timing:
    chunk = next(each for each in task_run.chunks if each.number == number)
    records, timing = cell.runner.run_chunk(chunk.requests, chunk=number, samples=len(chunk.samples))
    require_stored_answers(cell, number, records)
    return timing
