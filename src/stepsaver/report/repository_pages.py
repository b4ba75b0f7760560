"""`RESULTS.md` and `STATUS.md` of a folder of experiments, after the source's documents. Written whole each time."""

from stepsaver.report.blocks import Block, TableEntry
from stepsaver.report.overview import Overview, known_issues, metrics_table, trade_off_table
from stepsaver.report.tables import markdown_table

WRITTEN = "<!-- written by `stepsaver report`; what is changed here is lost -->"


def results_document(overview: Overview) -> str:
    """Returns what was measured: the best of each benchmark, accuracy against speed, and what is still to be run."""
    parts = ["# Experiment Results", WRITTEN]
    for title, block in (
        ("Performance Metrics Summary", metrics_table(overview)),
        ("Accuracy vs Speed Tradeoffs", trade_off_table(overview)),
    ):
        parts += [f"## {title}", _table(block)]
    return "\n\n".join([*parts, "## Pending Experiments", _pending(overview)]) + "\n"


def status_document(overview: Overview) -> str:
    """Returns where every experiment stands, what is known to be wrong, and what comes next."""
    rows = [
        (
            task.experiment.name,
            task.folder,
            task.model,
            f"{len(task.done)}/{len(task.cells)}",
            task.verdict().outcome,
            max(each.timestamp for each in task.summaries)[:10],
            task.source,
        )
        for task in overview.tasks
    ]
    columns = ("Experiment", "Task", "Model", "Configs done", "Verdict", "Date", "Read from")
    issues = [f"- **{level}**: {text}" for level, text in known_issues(overview)]
    parts = ["# Status", WRITTEN, markdown_table(rows, columns) if rows else "Nothing is stored yet."]
    parts += ["## Known Issues", "\n".join(issues) or "None.", "## Pending Experiments", _pending(overview)]
    return "\n\n".join(parts) + "\n"


def _pending(overview: Overview) -> str:
    lines = [
        f"{index}. {text}\n   - Priority: {priority}" for index, (priority, text) in enumerate(overview.pending, 1)
    ]
    return "\n".join(lines) or "Nothing."


def _table(block: Block) -> str:
    return markdown_table([tuple(map(_text, row)) for row in block["rows"]], tuple(block["columns"]))


def _text(cell: TableEntry) -> str:
    return " ".join(filter(None, (cell["text"], cell.get("small", ""))))
