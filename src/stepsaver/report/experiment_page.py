"""The page of one experiment: a tab per task."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepsaver.bench.experiment import Experiment
from stepsaver.report.blocks import tab
from stepsaver.report.cells import ReportTask
from stepsaver.report.documents import DocumentKey
from stepsaver.report.published_numbers import PublishedNumbers, published_blocks
from stepsaver.report.report_page import report_page
from stepsaver.report.sample_browser import browser_data, browser_keys
from stepsaver.report.task_blocks import provenance_blocks, task_blocks


@dataclass(frozen=True)
class TraceLink:
    """A page beside the report that plays some of its samples."""

    file: str
    label: str
    documents: Sequence[DocumentKey]

    def as_json(self, shown: Sequence[DocumentKey]) -> dict[str, Any]:
        there = {key: position for position, key in enumerate(self.documents)}
        positions = {position: there[key] for position, key in enumerate(shown) if key in there}
        return {"file": self.file, "label": self.label, "positions": positions}


def experiment_page(
    experiment: Experiment,
    tasks: Sequence[ReportTask],
    *,
    others: Mapping[str, ReportTask | None] | None = None,
    other_name: str = "",
    published: PublishedNumbers | None = None,
    traces: Mapping[str, TraceLink] | None = None,
    unfinished: Sequence[str] = (),
) -> str:
    """Returns the page. `others` and `traces` are by the task's folder; `unfinished` are tasks with no config done."""
    tabs, samples = [], {}
    for task in tasks:
        other = (others or {}).get(task.folder)
        link = (traces or {}).get(task.folder)
        played = link.as_json(browser_keys(task, other)) if link else None
        samples[task.folder] = browser_data(task, other=other, other_name=other_name, traces=played)
        blocks = task_blocks(task, other=other, other_name=other_name)
        blocks += published_blocks(task, published) if published else []
        blocks.append({"kind": "samples", "title": "Samples", "tab": task.folder, "name": "samples"})
        verdict = task.verdict()
        blocks += provenance_blocks(task)
        tabs.append(tab(task.folder, blocks, outcome=verdict.outcome, sentence=_qualified(task, verdict.sentence)))
    about = [
        f"stepsaver report on {experiment.name}",
        f"model {tasks[0].model}",
        f"compared with {other_name}" if other_name else "",
        f"written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
    ]
    lead = _criterion(experiment)
    if unfinished:
        lead += f" No config is finished yet on {', '.join(unfinished)}."
    return report_page(experiment.spec.question, lead, " · ".join(filter(None, about)), tabs, samples)


def _qualified(task: ReportTask, sentence: str) -> str:
    """Returns the verdict's sentence, with a warning if the audit finds fault with the results."""
    faults = sum(finding.level == "invalid" for finding in task.findings)
    return (
        f"{sentence} The audit finds {faults} fault{'s' * (faults > 1)} with these results, see below."
        if faults
        else sentence
    )


def _criterion(experiment: Experiment) -> str:
    """Returns what was asked, in a sentence; every baseline is named once for each criterion."""
    configs = [each.name for each in experiment.configs if each.name not in experiment.baselines]
    asked = dict.fromkeys((experiment.baseline_of(name), experiment.success_of(name)) for name in configs)
    bounds = [
        f"a speed-up {success.confirm_if.speed_up} with a drop {success.confirm_if.drop_points} points against {name}"
        for name, success in asked or {(experiment.spec.baseline, experiment.spec.success): None}
    ]
    return f"Confirmed by {', and by '.join(bounds)}."
