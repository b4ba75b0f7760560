"""What an audit reads, the stored results of all configs on a task, and the findings that it reports."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepsaver.bench.checksums import document_holds
from stepsaver.bench.documents import Identity, Provenance, RunDocument, Summary, Timing
from stepsaver.bench.experiment import OWN_DECODING, ConfigSpec, Experiment
from stepsaver.bench.identity import run_id
from stepsaver.bench.store import IDENTITY, SAMPLES, SUMMARY, TRACE, read_cell_files, read_run, read_summary
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.prediction import PREDICTIONS
from stepsaver.engine.rules.rule import Rule
from stepsaver.evaluation.inert import ScoredLengths, acting_rules, inert_rules
from stepsaver.evaluation.records import RequestRecord

Level = Literal["invalid", "disturbed", "remark"]  # results are wrong; timings are, and answers stand; worth knowing


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

    def answers(self) -> dict[Any, tuple]:
        """Returns what each request gave: tokens, or the score."""
        return {each.key: (each.ids, each.loglikelihood) for each in self.records}

    @property
    def acting(self) -> tuple[Rule, ...]:
        """The rules that can act at all in blocks of this size."""
        rules = self.config.parsed_rules()
        decoding = self.identity.decoding
        inert = inert_rules(
            rules, _LONG_REQUEST, block_size=decoding.block_size, prediction=PREDICTIONS[decoding.predicts]
        )
        return acting_rules(rules, inert)

    @property
    def deciding(self) -> tuple[Rule, ...]:
        """The rules as far as they decide answers: cells with equal ones, policy and caches give the same answers."""
        return tuple(rule.same_answers_as() for rule in self.acting)

    def has_the_caches_of(self, other: "CellEvidence") -> bool:
        return all(getattr(self.config, name) == getattr(other.config, name) for name in OWN_DECODING)

    def is_decoded_as(self, other: "CellEvidence") -> bool:
        """Whether all decoding settings are the same, joins too, which change the rate and not the answers."""
        return self.identity.decoding == other.identity.decoding

    def may_leave_out_the_same(self, other: "CellEvidence") -> bool:
        """Whether their ceilings are equal: rules that find nothing here to act on, or the same work, are no fault."""
        ours, theirs = (cell.summary.ceiling if cell.summary else None for cell in (self, other))
        return ours is not None and theirs is not None and abs(ours - theirs) < 1e-9


_LONG_REQUEST = [ScoredLengths(context=1, continuation=16)]  # as many steps in a block as possible


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

    def others(self) -> Iterator[tuple[CellEvidence, CellEvidence]]:
        """Yields every computed cell with its baseline, if that is another cell."""
        by_name = {cell.name: cell for cell in self.cells}
        for cell in self.computed:
            baseline = by_name.get(self.experiment.baseline_of(cell.name))
            if baseline is not None and baseline is not cell:
                yield cell, baseline

    def baselines(self) -> list[CellEvidence]:
        return [cell for cell in self.cells if cell.name in self.experiment.baselines]

    def cannot_differ(self, one: CellEvidence, other: CellEvidence) -> bool:
        is_alike = one.deciding == other.deciding and one.has_the_caches_of(other)
        return is_alike and self.policy(one) == self.policy(other)

    def policy(self, cell: CellEvidence) -> str:
        return self.decoder(cell).description

    def decoder(self, cell: CellEvidence) -> Decoder:
        decoding = self.experiment.spec.decoding
        given: dict[str, Any] = {name: cell.given[name] for name in ("decode", "policy") if name in cell.given}
        return cell.config.decoder(decoding.model_copy(update=given))


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
    cell = read_cell_files(folder, stored.run_id, with_former=True)
    summary = read_summary(folder / SUMMARY)
    if summary is not None and summary.run_id != stored.run_id:
        summary = None  # from another run: never used
    provenance = stored.provenance or Provenance()
    return CellEvidence(
        config,
        identity=stored.identity,
        git=provenance.git or {},
        given=provenance.given or {},
        records=tuple(cell.all_records),
        timings=tuple(cell.own_timings),
        counting=tuple(cell.counting_timings),
        faults=(*_identity_faults(stored), *cell.faults),
        summary=summary,
    )


def _identity_faults(stored: RunDocument) -> list[str]:
    if stored.sum is None:
        return [f"{IDENTITY} is of the former format: it has no checksum"]
    if not document_holds(stored.as_json()):
        return [f"{IDENTITY} was changed"]
    if run_id(stored.identity) != stored.run_id:
        return [f"{IDENTITY} has the id of another run than its identity is of"]
    return []
