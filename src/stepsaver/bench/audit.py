"""Whether results can be trusted: each check is a function from stored cells to findings, in plain words.

A record is never compared with itself: every check that compares takes two different cells, or a cell and the
experiment's own file.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal

from stepsaver.bench.session import CACHES
from stepsaver.bench.spec import ConfigSpec, Experiment
from stepsaver.bench.store import IDENTITY, SUMMARY, read_cell, read_json
from stepsaver.engine import registry
from stepsaver.engine.decode.policy import parse_policy
from stepsaver.engine.errors import UsageError
from stepsaver.engine.prediction import PREDICTIONS
from stepsaver.engine.reuse.rule import ReuseRule
from stepsaver.evaluation.inert import ScoredLengths, acting_rules, inert_rules
from stepsaver.evaluation.records import RequestRecord

Level = Literal["invalid", "remark"]
SLOW_CHUNK = 0.5  # of a config's own median rate: a cold start or a busy machine
TWINS_DIFFER = 0.25
RUNAWAY = 1.5  # times the baseline's tokens per sample
CUT_SHARE = 0.1  # more samples at the limit than in the baseline
PREDICTION = 0.25


@dataclass(frozen=True)
class Finding:
    level: Level
    check: str
    message: str

    def __str__(self) -> str:
        return f"audit, {self.level}: {self.message} [{self.check}]"


@dataclass(frozen=True)
class AuditedCell:
    """A config's stored results."""

    config: ConfigSpec
    identity: dict[str, Any]
    git: dict[str, Any]  # where the run began
    records: tuple[RequestRecord, ...]
    timings: tuple[dict[str, Any], ...]
    summary: dict[str, Any] | None
    given: dict[str, Any] = field(default_factory=dict)  # what the command line changed of the experiment's file

    @property
    def name(self) -> str:
        return self.config.name

    def answers(self) -> dict[Any, tuple]:
        """What each request gave: tokens, or the score."""
        return {each.key: (each.ids, each.loglikelihood) for each in self.records}

    @property
    def acting(self) -> tuple[ReuseRule, ...]:
        """The rules that can act at all in blocks of this size."""
        rules = self.config.reuse_rules()
        decoding = self.identity["decoding"]
        prediction = PREDICTIONS[decoding.get("predicts", "next")]  # runs before there were others do not say it
        block_size = decoding["block_size"]
        return acting_rules(rules, inert_rules(rules, _LONG_REQUEST, block_size=block_size, prediction=prediction))

    @property
    def deciding(self) -> tuple[ReuseRule, ...]:
        """What the answers depend on, the policy aside: two cells that agree in it give the same ones."""
        return tuple(rule.same_answers_as() for rule in self.acting)


_LONG_REQUEST = [ScoredLengths(context=1, continuation=16)]  # as many steps in a block as there can be


@dataclass(frozen=True)
class AuditedTask:
    experiment: Experiment
    task: str
    cells: tuple[AuditedCell, ...]

    @property
    def computed(self) -> tuple[AuditedCell, ...]:
        """The cells that were run: not those that took over the answers of an equal one."""
        return tuple(cell for cell in self.cells if not (cell.summary or {}).get("equal_to"))

    def others(self) -> Iterator[tuple[AuditedCell, AuditedCell]]:
        """Every computed cell with its baseline, where that is another one."""
        by_name = {cell.name: cell for cell in self.cells}
        for cell in self.computed:
            baseline = by_name.get(self.experiment.baseline_of(cell.name))
            if baseline is not None and baseline is not cell:
                yield cell, baseline

    def baselines(self) -> list[AuditedCell]:
        return [cell for cell in self.cells if cell.name in self.experiment.baselines]


Check = Callable[[AuditedTask], Iterator[Finding]]


def read_task(experiment: Experiment, results: Path, cell_folder: str) -> AuditedTask:
    """The stored cells of a task; configs without results are not there."""
    cells = []
    for config in experiment.configs:
        folder = results / cell_folder / config.name
        stored = read_json(folder / IDENTITY)
        if stored is None:
            continue
        cell = read_cell(folder, stored["run_id"])
        summary = read_json(folder / SUMMARY)
        if summary is not None and summary.get("run_id") != stored["run_id"]:
            summary = None  # of another run: never read
        provenance = stored.get("provenance") or {}
        git, given = provenance.get("git") or {}, provenance.get("given") or {}
        records, timings = tuple(cell.all_records), tuple(cell.own_timings)
        cells.append(AuditedCell(config, stored["identity"], git, records, timings, summary, given))
    return AuditedTask(experiment, cell_folder, tuple(cells))


def audit(task: AuditedTask) -> list[Finding]:
    found = [finding for check in CHECKS for finding in check(task)]
    return sorted(found, key=lambda finding: finding.level)


def _policy(task: AuditedTask, cell: AuditedCell) -> str:
    declared = cell.config.policy or cell.given.get("policy") or task.experiment.spec.decoding.policy
    return registry.describe(parse_policy(declared))


def _same_caches(one: AuditedCell, other: AuditedCell) -> bool:
    return all(getattr(one.config, name) == getattr(other.config, name) for name in CACHES)


def _is_policy(stored: str | None, declared: str) -> bool:
    """Whether a run's policy is the declared one. Its text may lack a field that the policy was given since."""
    try:
        return stored is not None and registry.describe(parse_policy(stored)) == declared
    except UsageError:
        return False


def samples_are_the_same(task: AuditedTask) -> Iterator[Finding]:
    """Every sample once in every config, and the same prompts."""
    for cell in task.cells:
        stored = len({(each.key.task, each.key.document) for each in cell.records})
        wanted = (cell.summary or {}).get("samples", stored)
        if stored != wanted:
            yield Finding("invalid", "samples", f"{cell.name} has {stored} samples, its summary is of {wanted}")
        repeated = [str(key) for key, count in Counter(each.key for each in cell.records).items() if count > 1]
        if repeated:
            yield Finding("invalid", "samples", f"{cell.name} has {len(repeated)} samples twice, such as {repeated[0]}")
    baselines = task.baselines()
    for cell, baseline in [*task.others(), *((each, baselines[0]) for each in baselines[1:])]:
        ours = {each.key: each.digest for each in cell.records}
        theirs = {each.key: each.digest for each in baseline.records}
        if ours.keys() != theirs.keys():
            odd = sorted(map(str, ours.keys() ^ theirs.keys()))
            yield Finding(
                "invalid", "samples", f"{cell.name} and {baseline.name} differ in {len(odd)} samples, such as {odd[0]}"
            )
        changed = [str(key) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
        if changed:
            yield Finding("invalid", "samples", f"{cell.name} had another prompt than {baseline.name} for {changed[0]}")


def neutral_configs_equal_the_baseline(task: AuditedTask) -> Iterator[Finding]:
    """A config whose rules cannot act gives the baseline's answers to the last token."""
    for cell, baseline in task.others():
        if not cell.acting and _cannot_differ(task, cell, baseline) and cell.answers() != baseline.answers():
            yield Finding("invalid", "neutral", f"{cell.name} reuses nothing and yet differs from {baseline.name}")


def equal_configs_were_checked(task: AuditedTask) -> Iterator[Finding]:
    """A config whose answers were taken over from another one was computed for some requests, and agreed."""
    for cell in task.cells:
        leader, checked = (cell.summary or {}).get("equal_to"), (cell.summary or {}).get("spot_check")
        if leader and checked and checked["different"]:
            yield Finding(
                "invalid", "equal", f"{cell.name} is not equal to {leader} after all: {checked['different'][0]}"
            )
        elif leader:
            rules = ", ".join(each["rule"] for each in (cell.summary or {}).get("inert_rules", ())) or "its rules"
            yield Finding("remark", "equal", f"{cell.name} equals {leader}: {rules} cannot act on this task")


def equal_and_different_where_expected(task: AuditedTask) -> Iterator[Finding]:
    """Rules that amount to the same give the same answers; others that act on many samples leave a mark."""
    for one, other in combinations(task.computed, 2):
        same = one.answers() == other.answers()
        if not same and _cannot_differ(task, one, other):
            yield Finding(
                "invalid", "identical", f"{one.name} and {other.name} have rules that amount to the same and yet differ"
            )
        if same and one.deciding != other.deciding and one.records:
            unapplied = _work(one) == _work(other) and not _may_leave_out_the_same(one, other)
            yield Finding(
                "invalid" if unapplied else "remark",
                "identical",
                f"{one.name} and {other.name} have different rules and identical answers"
                + (": the rules were not applied" if unapplied else ""),
            )


def _may_leave_out_the_same(one: AuditedCell, other: AuditedCell) -> bool:
    """By their ceilings: rules that find nothing to act on here, or the same things, are no fault."""
    ours, theirs = ((cell.summary or {}).get("ceiling") for cell in (one, other))
    return ours is not None and theirs is not None and abs(ours - theirs) < 1e-9


def _work(cell: AuditedCell) -> tuple[float, float]:
    return sum(each["row_layers"] for each in cell.timings), sum(each["flops"] for each in cell.timings)


def _cannot_differ(task: AuditedTask, one: AuditedCell, other: AuditedCell) -> bool:
    is_alike = one.deciding == other.deciding and _same_caches(one, other)
    return is_alike and _policy(task, one) == _policy(task, other)


def reuse_is_real(task: AuditedTask) -> Iterator[Finding]:
    """A rule that acts executes fewer row-layers per denoising step than the baseline."""
    for cell, baseline in task.others():
        ours, theirs = _work_per_step(cell), _work_per_step(baseline)
        could = not _may_leave_out_the_same(cell, baseline) and _same_caches(cell, baseline)
        if cell.acting and could and ours is not None and theirs is not None and ours >= theirs:
            yield Finding(
                "invalid",
                "reuse",
                f"{cell.name} claims reuse and runs {ours:.0f} row-layers a step, not under {theirs:.0f}",
            )


def _work_per_step(cell: AuditedCell) -> float | None:
    steps = sum(each["denoising_steps"] for each in cell.timings)
    kinds = [figures for each in cell.timings for kind, figures in each["by_kind"].items() if kind in ("full", "sub")]
    return sum(figures["row_layers"] for figures in kinds) / steps if steps else None


def layer_groups_are_comparable(task: AuditedTask) -> Iterator[Finding]:
    """Subsets of one grid have equal size, and every index exists."""
    from stepsaver.bench.spec import read_experiment

    layers = next((cell.identity.get("layers") for cell in task.cells), None)
    try:
        read_experiment(task.experiment.folder, layers=layers)
    except UsageError as error:
        yield Finding("invalid", "layers", str(error))


def one_machine_and_one_code(task: AuditedTask) -> Iterator[Finding]:
    for name in (
        "source",
        "kernels",
        "weights",
        "device",
        "dtype",
        "libraries",
        "model",
        "batch_size",
        "metric",
        "token_limit",
    ):
        values = {str(cell.identity.get(name)) for cell in task.cells}
        if len(values) > 1:
            yield Finding("invalid", "provenance", f"configs differ in {name}: {' and '.join(sorted(values))}")
    commits = {str(cell.git.get("commit")) for cell in task.cells}
    if len(commits) > 1:
        yield Finding("remark", "provenance", f"configs were begun at {len(commits)} commits, with the same code")
    dirty = [cell.name for cell in task.cells if cell.git.get("dirty")]
    if dirty:
        yield Finding(
            "remark", "provenance", f"{len(dirty)} configs were begun while src/ had changes that no commit holds"
        )


def decoding_is_as_declared(task: AuditedTask) -> Iterator[Finding]:
    for cell in task.cells:
        own = {name: value for name in CACHES if (value := getattr(cell.config, name)) is not None}
        effective = cell.identity.get("decoding", {})
        given = {name: value for name, value in cell.given.items() if name in effective}
        declared = declared_decoding(task.experiment) | given | own
        wrong = [name for name, value in declared.items() if effective.get(name) != value]
        if not _is_policy(cell.identity.get("policy"), _policy(task, cell)):
            wrong.append("policy")
        if wrong:
            yield Finding("invalid", "decoding", f"{cell.name} did not run with the declared {', '.join(wrong)}")
    estimators = {str(cell.identity.get("estimator")) for cell in task.cells}
    if len(estimators) > 1:
        yield Finding("invalid", "decoding", f"configs were scored by different estimators: {', '.join(estimators)}")


def declared_decoding(experiment: Experiment) -> dict[str, Any]:
    """What the experiment's file says, or its defaults; what it leaves to the model is not declared."""
    names = ("block_size", "sub_block_size", "mask_id", "prefix_cache", "block_cache")
    declared = {name: getattr(experiment.spec.decoding, name) for name in names}
    return {name: value for name, value in declared.items() if value is not None}


def tokens_end_at_the_stop(task: AuditedTask) -> Iterator[Finding]:
    for cell in task.cells:
        stops = set(cell.identity.get("decoding", {}).get("stop_ids", ()))
        behind = [str(each.key) for each in cell.records if each.path == "generation" and stops & set(each.ids[:-1])]
        if behind:
            yield Finding("invalid", "tokens", f"{cell.name} counts tokens behind the stop token, as in {behind[0]}")


def texts_neither_run_away_nor_break_off(task: AuditedTask) -> Iterator[Finding]:
    for cell, baseline in task.others():
        if not cell.records or not baseline.records or cell.records[0].path != "generation":
            continue
        ours, theirs = (sum(r.tokens for r in each.records) / len(each.records) for each in (cell, baseline))
        cut, base_cut = (
            sum(r.finish == "length" for r in each.records) / len(each.records) for each in (cell, baseline)
        )
        if theirs and not 1 / RUNAWAY < ours / theirs < RUNAWAY:
            yield Finding(
                "remark", "texts", f"{cell.name} writes {ours:.0f} tokens a sample, {baseline.name} {theirs:.0f}"
            )
        if cut > base_cut + CUT_SHARE:
            yield Finding(
                "remark",
                "texts",
                f"{cell.name} hits the token limit in {cut:.0%} of samples, {baseline.name} in {base_cut:.0%}",
            )


def rates_are_steady(task: AuditedTask) -> Iterator[Finding]:
    """A cold start shows as a slow chunk; twins that do the same work have to be about as fast."""
    rates = {
        cell.name: [each["tokens"] / each["seconds"] for each in cell.timings if each["seconds"] and each["comparable"]]
        for cell in task.cells
    }
    for name, values in rates.items():
        slow = [place for place, value in enumerate(values) if value < SLOW_CHUNK * median(values)]
        if slow:
            yield Finding(
                "remark", "rates", f"{name} was slow in {len(slow)} of {len(values)} chunks, first in timing {slow[0]}"
            )
    for one, other in combinations(task.computed, 2):
        alike = one.acting == other.acting and _same_caches(one, other) and _policy(task, one) == _policy(task, other)
        if rates[one.name] and rates[other.name] and alike and one.answers() == other.answers():
            ratio = median(rates[one.name]) / median(rates[other.name])
            if abs(ratio - 1) > TWINS_DIFFER:
                yield Finding(
                    "invalid",
                    "rates",
                    f"{one.name} and {other.name} do the same work, one at {ratio:.2f} times the rate",
                )


def timings_are_comparable(task: AuditedTask) -> Iterator[Finding]:
    """Shards that share a machine slow each other down: what they took says nothing about a config."""
    shared = [cell.name for cell in task.cells if any(not each["comparable"] for each in cell.timings)]
    if shared:
        yield Finding(
            "remark",
            "shards",
            f"{len(shared)} configs have chunks that were timed by concurrent shards on one machine; "
            "no speed-up counts them",
        )


def predictions_hold(task: AuditedTask) -> Iterator[Finding]:
    for cell in task.cells:
        summary = cell.summary
        if summary is None or summary["is_baseline"] or not summary.get("predicted_speed_up"):
            continue
        measured, predicted = summary["speed_up"]["tokens_per_s"][0], summary["predicted_speed_up"]
        if abs(measured / predicted - 1) > PREDICTION:
            yield Finding(
                "remark",
                "prediction",
                f"{cell.name} measured {measured:.2f}x where its operations predict {predicted:.2f}x",
            )


def batches_do_not_matter(task: AuditedTask) -> Iterator[Finding]:
    """A few samples decoded alone give what they gave in their batch; near-ties of rounding are the one excuse."""
    for cell in task.cells:
        checked = (cell.summary or {}).get("batch_invariance")
        if checked and checked["different"]:
            yield Finding(
                "invalid",
                "batches",
                f"{cell.name}: {checked['different']} of {checked['samples']} samples differ when decoded alone",
            )


CHECKS: tuple[Check, ...] = (
    samples_are_the_same,
    neutral_configs_equal_the_baseline,
    equal_configs_were_checked,
    equal_and_different_where_expected,
    reuse_is_real,
    layer_groups_are_comparable,
    one_machine_and_one_code,
    decoding_is_as_declared,
    tokens_end_at_the_stop,
    texts_neither_run_away_nor_break_off,
    rates_are_steady,
    timings_are_comparable,
    predictions_hold,
    batches_do_not_matter,
)
