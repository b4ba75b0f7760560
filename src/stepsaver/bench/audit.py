"""Whether results can be trusted: every check turns the stored cells of a task into findings, in plain words.

A record is never compared with itself: a check takes two different cells, or a cell and the experiment's own file.

| check | finds |
|---|---|
| integrity | a line or document that does not agree with its checksum, or is of another run |
| samples | a sample that is missing or stored twice, a prompt that is not the baseline's |
| neutral | a config whose rules cannot act, and whose answers are not the baseline's |
| equal | a config that took over another one's answers, and did not agree on the requests it computed |
| identical | rules that amount to the same with different answers, and other rules with the same answers and work |
| reuse | a config whose rules act, and that runs no less than its baseline |
| layers | layers that the model does not have, and groups of a grid of unequal size |
| provenance | configs that ran with other code, libraries or settings, or from uncommitted code |
| decoding | a config that did not run with the declared rules, policy, decoding settings or estimator |
| tokens | tokens that are counted after a stop token |
| texts | texts much longer or shorter than the baseline's, or cut off far more often |
| rates | disturbed chunks, equal work at unequal rates, rates that contradict the speed-up, a busy machine |
| shards | timings of processes that shared a machine |
| prediction | a speed-up far from the predicted one |
| batches | samples whose answer depends on their batch |
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from stepsaver.bench.checksums import document_holds
from stepsaver.bench.documents import Identity, RunDocument, Summary, Timing
from stepsaver.bench.experiment import OWN_DECODING, ConfigSpec, Experiment
from stepsaver.bench.experiment_file import find_mistakes
from stepsaver.bench.folders import split_task_folder
from stepsaver.bench.identity import run_id
from stepsaver.bench.statistics import Interval
from stepsaver.bench.store import IDENTITY, SAMPLES, SUMMARY, TRACE, read_cell_files, read_run, read_summary
from stepsaver.bench.timings import chunk_rates, median_rate, slow_chunks
from stepsaver.engine import registry
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.machine import IDLE_CORES
from stepsaver.engine.positions import PREDICTIONS
from stepsaver.engine.rules.layer_reuse import LayerReuse
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.trace import COMPUTED_STEPS
from stepsaver.evaluation.inert import ScoredLengths, acting_rules, inert_rules
from stepsaver.evaluation.records import RequestRecord

Level = Literal["invalid", "disturbed", "remark"]  # results are wrong; timings are, and answers stand; worth knowing

FAULTS_NAMED = 3  # of a config, one by one
TWINS_DIFFER = 0.25  # in their rates, at most
ABOUT_EQUAL = 0.05
RUNAWAY = 1.5  # times the baseline's tokens per sample
CUT_SHARE = 0.1  # by which the share of samples at the limit may exceed the baseline's
FAR_FROM_PREDICTED = {"operations": 0.25, "curve": 0.1}
IN_ONE_TASK = (  # what all configs of a task have in common
    "source", "kernels", "weights", "device", "dtype", "libraries", "model", "batch_size", "metric", "token_limit",
)  # fmt: skip
_LONG_REQUEST = [ScoredLengths(context=1, continuation=16)]  # as many steps in a block as possible


@dataclass(frozen=True)
class Finding:
    level: Level
    check: str
    message: str
    configs: tuple[str, ...] = ()  # to be timed again

    def __str__(self) -> str:
        return f"audit, {self.level}: {self.message} [{self.check}]"


@dataclass(frozen=True)
class CellEvidence:
    """A cell's stored results, as far as their checksums hold."""

    config: ConfigSpec
    identity: Identity
    git: dict[str, Any]  # commit and branch when the run began
    given: dict[str, Any]  # what the command line changed in the experiment's file
    records: tuple[RequestRecord, ...]
    timings: tuple[Timing, ...]  # one per stored chunk
    counting: tuple[Timing, ...]  # all that may count for a speed-up
    faults: tuple[str, ...]  # what is wrong with the files
    summary: Summary | None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_generated(self) -> bool:
        return bool(self.records) and self.records[0].path == "generation"

    def answers(self) -> dict[Any, tuple]:
        """Returns what each request gave: tokens, or the score."""
        return {each.key: (each.ids, each.loglikelihood) for each in self.records}

    def work(self) -> tuple[float, float]:
        return sum(each.row_layers for each in self.timings), sum(each.flops for each in self.timings)

    def work_per_step(self) -> float | None:
        """Returns positions x layers, those of commits too: some rules leave out nothing but rows of commits."""
        steps = sum(each.denoising_steps for each in self.timings)
        counted = (*COMPUTED_STEPS, "commit")
        kinds = [figures for each in self.timings for kind, figures in each.by_kind.items() if kind in counted]
        return sum(figures["row_layers"] for figures in kinds) / steps if steps else None

    @property
    def acting(self) -> tuple[Rule, ...]:
        """The rules that can act at all in blocks of this size."""
        rules, decoding = self.config.parsed_rules(), self.identity.decoding
        prediction = PREDICTIONS[decoding.predicts]
        inert = inert_rules(rules, _LONG_REQUEST, block_size=decoding.block_size, prediction=prediction)
        return acting_rules(rules, inert)

    @property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules as far as they decide answers: cells with equal ones, policy and caches give the same answers."""
        return tuple(map(with_the_same_answers, self.acting))

    def has_the_caches_of(self, other: "CellEvidence") -> bool:
        return all(getattr(self.config, name) == getattr(other.config, name) for name in OWN_DECODING)


def with_the_same_answers(rule: Rule) -> Rule:
    """Returns one rule that stands for all settings with the same answers: a step whose output is reused runs nothing,
    whichever layers are named.
    """
    return replace(rule, layers="all") if isinstance(rule, LayerReuse) and rule.mode == "output" else rule


@dataclass(frozen=True)
class TaskEvidence:
    experiment: Experiment
    task: str
    cells: tuple[CellEvidence, ...]
    unidentified: tuple[str, ...] = ()  # configs with results, but nothing that says which run they are from

    @property
    def has_results(self) -> bool:
        return bool(self.cells or self.unidentified)

    @property
    def computed(self) -> tuple[CellEvidence, ...]:
        """The cells that were run, without those that took over the answers of an equal one."""
        return tuple(cell for cell in self.cells if not (cell.summary and cell.summary.equal_to))

    @property
    def baselines(self) -> list[CellEvidence]:
        return [cell for cell in self.cells if cell.name in self.experiment.baselines]

    def others(self) -> Iterator[tuple[CellEvidence, CellEvidence]]:
        """Yields every computed cell with its baseline, if that is another cell."""
        by_name = {cell.name: cell for cell in self.cells}
        for cell in self.computed:
            baseline = by_name.get(self.experiment.baseline_of(cell.name))
            if baseline is not None and baseline is not cell:
                yield cell, baseline

    def decoder(self, cell: CellEvidence) -> Decoder:
        given: dict[str, Any] = {name: cell.given[name] for name in ("decode", "policy") if name in cell.given}
        return cell.config.decoder(self.experiment.spec.decoding.model_copy(update=given))

    def cannot_differ(self, one: CellEvidence, other: CellEvidence) -> bool:
        is_alike = one.deciding == other.deciding and one.has_the_caches_of(other)
        return is_alike and self.decoder(one).description == self.decoder(other).description

    def has_something_to_leave_out(self, cell: CellEvidence) -> bool:
        """Whether rules that leave nothing out are a fault. Scored answers of a few tokens, and blocks that are one
        sub-block, may give some rules nothing to act on, if others do act.
        """
        is_usual = cell.is_generated and any("sub" in each.by_kind for each in cell.timings)
        return is_usual or not any(each.acting and each.work() < base.work() for each, base in self.others())


def read_evidence(experiment: Experiment, results: Path, cell_folder: str) -> TaskEvidence:
    """Returns the stored cells of a task, without configs that have no results."""
    cells, unidentified = [], []
    for config in experiment.configs:
        folder = results / cell_folder / config.name
        stored = read_run(folder)
        if stored is not None:
            cells.append(_read_cell(config, folder, stored))
        elif any((folder / name).exists() for name in (SAMPLES, TRACE, SUMMARY)):
            unidentified.append(config.name)
    return TaskEvidence(experiment, cell_folder, tuple(cells), tuple(unidentified))


def _read_cell(config: ConfigSpec, folder: Path, stored: RunDocument) -> CellEvidence:
    cell = read_cell_files(folder, stored.run_id)
    summary = read_summary(folder / SUMMARY)
    if summary is not None and summary.run_id != stored.run_id:
        summary = None  # from another run: never used
    return CellEvidence(
        config,
        identity=stored.identity,
        git=stored.provenance.git,
        given=stored.provenance.given,
        records=tuple(cell.all_records),
        timings=tuple(cell.own_timings),
        counting=tuple(cell.counting_timings),
        faults=(*_identity_faults(stored), *cell.faults),
        summary=summary,
    )


def _identity_faults(stored: RunDocument) -> list[str]:
    if not document_holds(stored.as_json()):
        return [f"{IDENTITY} was changed"]
    if run_id(stored.identity) != stored.run_id:
        return [f"{IDENTITY} has the id of another run than its identity is of"]
    return []


Said = tuple[Level, str] | tuple[Level, str, tuple[str, ...]]  # the last: configs to be timed again
Checker = Callable[[TaskEvidence], Iterator[Said]]


def audit(task: TaskEvidence) -> list[Finding]:
    """Returns the findings of all checks, the worst first."""
    found = [Finding(said[0], name, *said[1:]) for name, check in CHECKS.items() for said in check(task)]
    return sorted(found, key=lambda finding: get_args(Level).index(finding.level))


def timed_again_by(experiment: Experiment, folder: str, findings: Sequence[Finding]) -> str:
    """Returns the command that times again what was disturbed, all configs if a baseline was; empty if nothing was."""
    configs = sorted({name for finding in findings if finding.level == "disturbed" for name in finding.configs})
    if not configs:
        return ""
    task, limit = split_task_folder(folder)
    limited = [f"--limit {limit}"] if limit else []
    named = [] if set(configs) & set(experiment.baselines) else configs
    return " ".join(["stepsaver run", experiment.name, "--task", task, *limited, "--force", *named])


def _integrity(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        if cell.faults:
            more = f"; and {len(cell.faults) - FAULTS_NAMED} more" if len(cell.faults) > FAULTS_NAMED else ""
            yield "invalid", f"{cell.name}: {'; '.join(cell.faults[:FAULTS_NAMED])}{more}"
    for name in task.unidentified:
        yield "invalid", f"{name} has results and no {IDENTITY} that says which run they are of"


def _samples(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        stored = len({(each.key.task, each.key.document) for each in cell.records})
        wanted = cell.summary.samples if cell.summary else stored
        if stored != wanted:
            yield "invalid", f"{cell.name} has {stored} samples, its summary is of {wanted}"
        repeated = [str(key) for key, count in Counter(each.key for each in cell.records).items() if count > 1]
        if repeated:
            yield "invalid", f"{cell.name} has {len(repeated)} samples twice, such as {repeated[0]}"
    baselines = task.baselines
    for cell, baseline in [*task.others(), *((each, baselines[0]) for each in baselines[1:])]:
        ours, theirs = ({each.key: each.digest for each in side.records} for side in (cell, baseline))
        is_scored_alike = cell.is_generated or cell.identity.estimator == baseline.identity.estimator
        if ours.keys() != theirs.keys():
            odd = sorted(map(str, ours.keys() ^ theirs.keys()))
            yield "invalid", f"{cell.name} and {baseline.name} differ in {len(odd)} samples, such as {odd[0]}"
        changed = [str(key) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]
        if changed and is_scored_alike:
            yield "invalid", f"{cell.name} had another prompt than {baseline.name} for {changed[0]}"


def _neutral(task: TaskEvidence) -> Iterator[Said]:
    for cell, baseline in task.others():
        if not cell.acting and task.cannot_differ(cell, baseline) and cell.answers() != baseline.answers():
            yield "invalid", f"{cell.name} reuses nothing and yet differs from {baseline.name}"


def _equal(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        if cell.summary is None or not cell.summary.equal_to:
            continue
        leader, checked = cell.summary.equal_to, cell.summary.spot_check
        if checked and checked.different:
            yield "invalid", f"{cell.name} is not equal to {leader} after all: {checked.different[0]}"
        else:
            rules = ", ".join(each.rule for each in cell.summary.inert_rules) or "its rules"
            yield "remark", f"{cell.name} equals {leader}: {rules} cannot act on this task"


def _identical(task: TaskEvidence) -> Iterator[Said]:
    for one, other in combinations(task.computed, 2):
        same = one.answers() == other.answers()
        if not same and task.cannot_differ(one, other):
            yield "invalid", f"{one.name} and {other.name} have rules that amount to the same and yet differ"
        if same and one.deciding != other.deciding and one.records:
            says = f"{one.name} and {other.name} have different rules and identical answers"
            if one.work() == other.work() and task.has_something_to_leave_out(one):
                yield "invalid", f"{says}: the rules were not applied"
            else:
                yield "remark", says


def _reuse(task: TaskEvidence) -> Iterator[Said]:
    for cell, baseline in task.others():
        ours, theirs = cell.work_per_step(), baseline.work_per_step()
        could = cell.acting and cell.has_the_caches_of(baseline) and task.has_something_to_leave_out(cell)
        if could and ours is not None and theirs is not None and ours >= theirs:
            yield (
                "invalid",
                f"{cell.name} claims reuse and runs {ours:.0f} positions x layers a step, not under {theirs:.0f}",
            )


def _layers(task: TaskEvidence) -> Iterator[Said]:
    layers = next((cell.identity.layers for cell in task.cells), None)
    for mistake in find_mistakes(task.experiment.spec, task.experiment.configs, layers):
        yield "invalid", str(mistake)


def _provenance(task: TaskEvidence) -> Iterator[Said]:
    for name in IN_ONE_TASK:
        values = {str(getattr(cell.identity, name)) for cell in task.cells}
        if len(values) > 1:
            yield "invalid", f"configs differ in {name}: {' and '.join(sorted(values))}"
    commits = {str(cell.git.get("commit")) for cell in task.cells}
    if len(commits) > 1:
        yield "remark", f"configs were begun at {len(commits)} commits, with the same code"
    dirty = [cell.name for cell in task.cells if cell.git.get("dirty")]
    if dirty:
        yield "remark", f"{len(dirty)} configs were begun while src/ had changes that no commit holds"


def _decoding(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        stored, decoder = cell.identity, task.decoder(cell)
        declared = _declared_decoding(task.experiment, cell)
        if not decoder.has_blocks:
            declared = {name: value for name, value in declared.items() if name not in ("block_size", "sub_block_size")}
        wrong = [name for name, value in declared.items() if getattr(stored.decoding, name) != value]
        if stored.decoder != decoder.description:
            wrong.append("policy")
        if stored.rules != [registry.describe(rule) for rule in decoder.rules]:
            wrong.append("rules")
        if wrong:
            yield "invalid", f"{cell.name} did not run with the declared {', '.join(wrong)}"
    estimators = {cell.identity.estimator for cell in task.cells if not task.experiment.is_reference(cell.name)}
    if len(estimators) > 1:
        yield "invalid", f"configs were scored by different estimators: {', '.join(estimators)}"


def _declared_decoding(experiment: Experiment, cell: CellEvidence) -> dict[str, Any]:
    """Returns the declared settings: the experiment's file or its defaults, overridden by the command line and then by
    the config. Settings that are left to the model are not declared.
    """
    names = ("block_size", "sub_block_size", "mask_id", "prefix_cache", "block_cache")
    declared = {name: getattr(experiment.spec.decoding, name) for name in names}
    declared |= {name: value for name, value in cell.given.items() if hasattr(cell.identity.decoding, name)}
    declared |= {name: value for name in OWN_DECODING if (value := getattr(cell.config, name)) is not None}
    return {name: value for name, value in declared.items() if value is not None}


def _tokens(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        stops = set(cell.identity.decoding.stop_ids)
        late = [str(each.key) for each in cell.records if each.path == "generation" and stops & set(each.ids[:-1])]
        if late:
            yield "invalid", f"{cell.name} counts tokens after the stop token, as in {late[0]}"


def _texts(task: TaskEvidence) -> Iterator[Said]:
    for cell, baseline in task.others():
        if not cell.is_generated or not baseline.records:
            continue
        sides = (cell.records, baseline.records)
        ours, theirs = (sum(each.tokens for each in side) / len(side) for side in sides)
        cut, base_cut = (sum(each.finish == "length" for each in side) / len(side) for side in sides)
        if theirs and not 1 / RUNAWAY < ours / theirs < RUNAWAY:
            yield "remark", f"{cell.name} writes {ours:.0f} tokens a sample, {baseline.name} {theirs:.0f}"
        if cut > base_cut + CUT_SHARE:
            yield (
                "remark",
                f"{cell.name} hits the token limit in {cut:.0%} of samples, {baseline.name} in {base_cut:.0%}",
            )


def _rates(task: TaskEvidence) -> Iterator[Said]:
    yield from _slow(task)
    yield from _unlike_twins(task)
    for cell in task.computed:
        if cell.summary is not None:
            yield from _pooled_time(cell.name, cell.summary)
            yield from _not_idle(cell.name, cell.summary)
    for cell, baseline in task.others():
        yield from _contradicted(cell, baseline)


def _slow(task: TaskEvidence) -> Iterator[Said]:
    """Lists disturbed chunks by number, because they can be timed again. A cold start shows as a slow chunk too."""
    found = slow_chunks({cell.name: cell.counting for cell in task.computed})
    for cell in task.computed:
        timed = len(chunk_rates(cell.counting))
        mine = [each for each in found if each.config == cell.name]
        disturbed, slow = (
            [str(each.chunk) for each in mine if each.is_disturbed is wanted] for wanted in (True, False)
        )
        if disturbed:
            yield (
                "remark",
                f"{cell.name} was disturbed in {len(disturbed)} of {timed} timings, of chunk {', '.join(disturbed)}: "
                "under half of its median rate where a config beside it was not; --repeat-disturbed times them again",
            )
        if slow:
            yield "remark", f"{cell.name} was slow in {len(slow)} of {timed} timings, of chunk {', '.join(slow)}"


def _unlike_twins(task: TaskEvidence) -> Iterator[Said]:
    """Twins, configs that do the same work, have to be about equally fast. Joins change the rate, not the answers."""
    rates = {cell.name: chunk_rates(cell.timings) for cell in task.computed}
    for one, other in combinations(task.computed, 2):
        is_alike = one.acting == other.acting and one.identity.decoding == other.identity.decoding
        is_alike = is_alike and task.decoder(one).description == task.decoder(other).description
        is_alike = is_alike and one.answers() == other.answers()
        if is_alike and rates[one.name] and rates[other.name]:
            ratio = median(rates[one.name]) / median(rates[other.name])
            if abs(ratio - 1) > TWINS_DIFFER:
                says = f"{one.name} and {other.name} do the same work, one at {ratio:.2f} times the rate"
                yield "disturbed", says, (one.name, other.name)


def _pooled_time(name: str, summary: Summary) -> Iterator[Said]:
    """The rate over the whole run is about the median over chunks, unless a few chunks took most of the time.

    "About" is closer than the interval is wide: with four chunks, one of them shorter, the two never agree much better.
    On a quiet machine the interval is narrower than a median is from a mean; what is that close is no fault either.
    """
    rate, pooled = summary.rate, summary.throughput.tokens_per_s
    if rate is None or pooled is None or summary.chunks_not_comparable:
        return
    if abs(pooled - rate.value) > max(rate.high - rate.low, ABOUT_EQUAL * rate.value):
        yield (
            "disturbed",
            f"{name} has {rate.value:.0f} tokens/s [{rate.low:.0f}, {rate.high:.0f}] as the median over chunks "
            f"and {pooled:.0f} over the whole time: a few chunks took too long",
            (name,),
        )


def _not_idle(name: str, summary: Summary) -> Iterator[Said]:
    """Speed-ups compare chunks in pairs, which helps; the rates themselves are those of a busy machine."""
    cores = summary.other_cores
    if cores is not None and cores.median >= IDLE_CORES:
        yield (
            "remark",
            f"{name} was timed on a machine that was not idle: others kept {cores.median:.1f} cores busy, "
            f"at most {cores.largest:.1f}",
        )


def _contradicted(cell: CellEvidence, baseline: CellEvidence) -> Iterator[Said]:
    """The rates that are shown agree with the speed-up that is shown beside them.

    A baseline is timed anew in every session in which one of its configs runs. If those of a config agree with the
    speed-up and only all of them together do not, the machine was faster or slower on another day: no fault.
    """
    if cell.summary is None or baseline.summary is None:
        return
    ours, theirs, up = cell.summary.rate, baseline.summary.rate, cell.summary.speed_up.tokens_per_s
    if ours is None or theirs is None or _agree(ours, theirs, up):
        return
    together = {each.key for each in cell.counting}
    paired = [each for each in baseline.counting if each.key in together]
    beside = median_rate(paired)
    said = (
        f"{cell.name} and {baseline.name} have {ours.value:.0f} and {theirs.value:.0f} tokens/s "
        f"beside a speed-up of {up.value:.2f} [{up.low:.2f}, {up.high:.2f}]"
    )
    if len(paired) < len(baseline.counting) and beside is not None and _agree(ours, beside, up):
        yield (
            "remark",
            f"{said}: {baseline.name} has timings of other sessions too; in those of {cell.name} it had "
            f"{beside.value:.0f} tokens/s",
        )
    else:
        yield "invalid", said


def _agree(ours: Interval, theirs: Interval, up: Interval) -> bool:
    """Whether a speed-up's interval meets that of the two rates' ratio."""
    return theirs.low <= 0 or (up.low <= ours.high / theirs.low and up.high >= ours.low / theirs.high)


def _shards(task: TaskEvidence) -> Iterator[Said]:
    shared = [cell.name for cell in task.cells if any(not each.comparable for each in cell.timings)]
    if shared:
        yield (
            "remark",
            f"{len(shared)} configs have chunks that were timed by concurrent shards on one machine; "
            "no speed-up counts them",
        )


def _prediction(task: TaskEvidence) -> Iterator[Said]:
    for cell in task.cells:
        summary = cell.summary
        if summary is None or summary.is_baseline or not summary.predicted:
            continue
        measured = summary.speed_up.tokens_per_s.value
        if abs(measured / summary.predicted - 1) > FAR_FROM_PREDICTED[summary.predicted_by]:
            by = {"operations": "its operations predict", "curve": "the cost of its forwards predicts"}
            says = f"{by[summary.predicted_by]} {summary.predicted:.2f}x"
            yield "remark", f"{cell.name} measured {measured:.2f}x where {says}"


def _batches(task: TaskEvidence) -> Iterator[Said]:
    """Rounding at a near-tie is the only excuse."""
    for cell in task.cells:
        checked = cell.summary.batch_invariance if cell.summary else None
        if checked and checked.different:
            yield (
                "invalid",
                f"{cell.name}: {checked.different} of {checked.samples} samples differ when decoded alone",
            )


CHECKS: dict[str, Checker] = {
    "integrity": _integrity,
    "samples": _samples,
    "neutral": _neutral,
    "equal": _equal,
    "identical": _identical,
    "reuse": _reuse,
    "layers": _layers,
    "provenance": _provenance,
    "decoding": _decoding,
    "tokens": _tokens,
    "texts": _texts,
    "rates": _rates,
    "shards": _shards,
    "prediction": _prediction,
    "batches": _batches,
}
