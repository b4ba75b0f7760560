"""Entries of the experiment log, after the source's template: task, configuration, results, notes, logs."""

from dataclasses import dataclass

from stepsaver.bench.documents import Summary
from stepsaver.report.cells import ReportTask
from stepsaver.report.tables import compared_settings

LABELS = {"k": "Layer Reuse: k=", "layers": "Layer Subset: "}  # of a rule's fields, in the source's log


@dataclass(frozen=True)
class LogEntry:
    title: str
    task: str
    configuration: tuple[str, ...]
    results: tuple[str, ...]
    notes: str
    logs: str

    def lines(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Returns label, text and the lines below it."""
        return [
            ("Task", self.task, ()),
            ("Configuration", "", self.configuration),
            ("Results", "", self.results),
            ("Notes", self.notes, ()),
            ("Logs", self.logs, ()),
        ]


def log_entry(task: ReportTask) -> LogEntry:
    first = task.summaries[0]
    notes = [task.verdict().sentence, *(f"{each.level}: {each.message}." for each in task.findings)]
    notes += [f"{cell.name}: {cell.note}." for cell in task.unfinished]
    return LogEntry(
        title=f"{first.timestamp[:10]} - {task.experiment.name}",
        task=f"{task.folder} ({first.samples} samples)",
        configuration=tuple(_configuration(task, first)),
        results=tuple(_results(task)),
        notes=" ".join(notes),
        logs=f"{task.source}/{task.folder}/",
    )


def _configuration(task: ReportTask, first: Summary) -> list[str]:
    settings = list(compared_settings(task).values())
    lines = [
        LABELS.get(name, f"{name}: ") + "/".join(dict.fromkeys(each[name] for each in settings))
        for name in (settings[0] if settings else ())
    ]
    if not lines:
        rules_of = {cell.name: ", ".join(cell.config.rules) or "no reuse" for cell in task.cells}
        lines = ["Rules: " + "; ".join(f"{name}: {rules}" for name, rules in rules_of.items())]
    identity = first.identity
    caches = [name for name in ("prefix_cache", "block_cache") if getattr(identity.decoding, name)]
    lines.append(
        f"Other params: {identity.decoder},"
        f" {' and '.join(each.replace('_', ' ') for each in caches) or 'no cache'},"
        f" batch size {first.identity.batch_size}, model {task.model}"
    )
    return lines


def _results(task: ReportTask) -> list[str]:
    """Returns each baseline, and in each respect the best of the configs compared with it, without controls."""
    accuracy, rates, ups = [], [], []
    for base, compared in task.by_baseline():
        others = [each.summary for each in compared if each.summary is not None and not each.summary.is_control]
        if base is not None and base.summary is not None:
            accuracy.append(f"{base.name} {base.summary.accuracy:.2%} (baseline)")
            rates.append(f"{base.name} {_rate(base.summary):.2f} tokens/s (baseline)")
        if others:
            best, fastest = max(others, key=lambda each: each.accuracy), max(others, key=_rate)
            up = max(others, key=lambda each: each.speed_up.smaller.value)
            accuracy.append(f"best of the others: {best.config} {best.accuracy:.2%}")
            rates.append(f"best of the others: {fastest.config} {_rate(fastest):.2f} tokens/s")
            ups.append(f"{up.config} {up.speed_up.smaller.value:.2f}x")
    return [
        f"Accuracy: {'; '.join(accuracy)}",
        f"Throughput: {'; '.join(rates)}",
        f"Speedup: {'; '.join(ups) or 'nothing beside the baseline'}",
    ]


def _rate(summary: Summary) -> float:
    rate = summary.rate
    return rate.value if rate else 0.0


def log_entry_markdown(entry: LogEntry) -> str:
    lines = [f"#### {entry.title}"]
    for label, text, below in entry.lines():
        lines.append(f"- **{label}**: {text}".rstrip())
        lines += [f"  - {each}" for each in below]
    return "\n".join(lines)
