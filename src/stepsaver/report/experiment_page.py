"""The page of one experiment: a tab per task, with figures, tables, the audit, samples and where it all comes from."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Experiment
from stepsaver.report.blocks import Block, cell, facts, figure, named, notes, number, tab, table
from stepsaver.report.cells import ReportTask
from stepsaver.report.documents import DocumentKey
from stepsaver.report.figures import ACCURACY_SPEED, FIGURES, points, scatter, wanted_regions
from stepsaver.report.html_pages import report_page
from stepsaver.report.parallelism import parallelism_table
from stepsaver.report.published_numbers import PublishedNumbers, published_blocks
from stepsaver.report.sample_browser import browser_data, browser_keys
from stepsaver.report.tables import result_table


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
        blocks = _measured(task, other, other_name)
        blocks += published_blocks(task, published) if published else []
        blocks.append({"kind": "samples", "title": "Samples", "tab": task.folder, "name": "samples"})
        verdict = task.verdict()
        blocks += _provenance(task) if task.done else []
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
    known = {*experiment.baselines, experiment.reference}
    configs = [each.name for each in experiment.configs if each.name not in known]
    asked = dict.fromkeys((experiment.baseline_of(name), experiment.success_of(name)) for name in configs)
    bounds = [
        f"a speed-up {success.confirm_if.speed_up} with a drop {success.confirm_if.drop_points} points against {name}"
        for name, success in asked or {(experiment.spec.baseline, experiment.spec.success): None}
    ]
    return f"Confirmed by {', and by '.join(bounds)}."


def _measured(task: ReportTask, other: ReportTask | None, other_name: str) -> list[Block]:
    """Returns the figures, the tables and the audit."""
    blocks = [_first_figure(task, other, other_name)] if ACCURACY_SPEED.is_there(task) else []
    blocks.append(result_table(task))
    if other is not None:
        blocks.append(_comparison(task, other, other_name))
    blocks.append(_findings(task))
    drawn = [each for each in FIGURES if each is not ACCURACY_SPEED and each.is_there(task)]
    blocks += [
        figure(each.title, each.for_page(task), caption=each.caption, name=each.name, is_half=len(drawn) == 2)
        for each in drawn
    ]
    parallelism = parallelism_table(task)
    return [*blocks, parallelism] if parallelism["rows"] else blocks


def _first_figure(task: ReportTask, other: ReportTask | None, other_name: str) -> Block:
    caption, drawn = ACCURACY_SPEED.caption, ACCURACY_SPEED.for_page(task)
    if other is not None:
        drawn = scatter({"": points(task), other_name: points(other)}, wanted_regions(task))
        caption += f" Open marks are of {other_name}, in the colour of the config of the same name."
    return figure(ACCURACY_SPEED.title, drawn, caption=caption, name=ACCURACY_SPEED.name)


def _comparison(task: ReportTask, other: ReportTask, other_name: str) -> Block:
    """Returns configs of the same name side by side; those that only one side has stand alone."""
    here, there = ({each.config: each for each in side.summaries} for side in (task, other))
    rows = []
    for name in dict.fromkeys([*here, *there]):
        pair = here.get(name), there.get(name)
        accuracies = [each.accuracy if each else None for each in pair]
        rates = [each.rate.value if each and each.rate else None for each in pair]
        before, after = accuracies
        change = after - before if before is not None and after is not None else None
        rows.append(
            [
                named(name),
                *(number(each, ".1f", factor=100, suffix=" %") for each in accuracies),
                number(change, "+.1f", factor=100),
                *(number(each, ".0f") for each in rates),
                number(rates[1] / rates[0] if rates[0] and rates[1] else None, ".2f", suffix="x"),
            ]
        )
    sides = (task.experiment.name, other_name)
    accuracy, rate = ([f"{name}, {side}" for side in sides] for name in ("accuracy", "tokens/s"))
    caption = "Runs of different sessions or machines: accuracies can be compared, rates only with care."
    columns = ("config", *accuracy, "points", *rate, "ratio")
    return table("Side by side", columns, rows, caption=caption, name="compare")


def _findings(task: ReportTask) -> Block:
    items: list[tuple[str, str]] = [(each.level, each.message) for each in task.findings]
    items += [(each.state, f"{each.name}: {each.note}") for each in task.unfinished]
    if task.source == "artifacts":
        items.insert(0, ("remark", "Shown from the summaries in artifacts/: an audit needs the samples in results/."))
    return notes("What the audit found", items, nothing="The audit found nothing to remark on.", name="audit")


def _provenance(task: ReportTask) -> list[Block]:
    """Returns what all configs share, and what each has of its own."""
    first = task.summaries[0]
    identity, environment, git = first.identity, first.environment or {}, first.git or {}
    commit = (
        f"{git['commit']}{', src/ changed since' if git.get('dirty') else ''}" if git.get("commit") else "no git here"
    )
    evaluation = first.eval_params | {"metric": first.accuracy_metric, "samples": first.samples}
    loaded, warmed = first.throughput.loading_seconds, first.throughput.warm_up_seconds
    items = [
        ("model", _model(task, first)),
        ("code", f"hash {identity.source or '?'}, commit {commit}"),
        ("device", f"{first.gpu_info or identity.device or '?'}, {environment.get('machine', '?')}"),
        ("machine", _listed(first.machine or {}) or "not recorded"),
        ("versions", ", ".join(f"{name} {value}" for name, value in environment.items() if name != "machine")),
        ("decoding", _listed(identity.decoding.as_json())),
        ("decoder", identity.decoder),
        ("evaluation", _listed(evaluation)),
        ("estimator of log-likelihoods", identity.estimator or "?"),
        ("peak memory", f"{first.peak_memory_bytes / 2**20:,.0f} MiB"),
        ("loading, warm-up", f"{loaded:.1f} s, {warmed:.1f} s, not counted"),
    ]
    rows = [
        [
            named(each.config),
            cell(", ".join(each.identity.rules) or "no reuse"),
            cell(each.identity.decoder),
            named(each.run_id),
            named(each.timestamp),
        ]
        for each in task.summaries
    ]
    columns = ("config", "rules", "decoder", "run", "finished")
    return [
        facts("Where this comes from", items, name="provenance", is_folded=True),
        table("Runs", columns, rows, name="runs", is_folded=True),
    ]


def _model(task: ReportTask, summary: Summary) -> str:
    arguments, identity = summary.model_args, summary.identity
    revision = f", revision {arguments.revision}" if arguments.revision else ""
    return f"{task.model}{revision}, {arguments.dtype}, hash {identity.model or '?'}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plainly(value)}" for name, value in values.items())


def _plainly(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
