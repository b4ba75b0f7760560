"""Configs of a log-likelihood task that are provably equal: computed once, marked, and spot-checked.

A rule acts only if a block takes a second step. If no block does, every config gives the same numbers to the last bit,
speculative decoding aside; running all of them would only look like a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance

from stepsaver.bench.cells import CellRun
from stepsaver.bench.documents import SpotCheck
from stepsaver.bench.experiment import ConfigSpec
from stepsaver.bench.session import Chunk, TaskRun
from stepsaver.engine import registry
from stepsaver.evaluation.inert import InertRule, ScoredLengths, acting_rules, inert_rules, no_second_step

SPOT_CHECKED = 16  # requests, at least


@dataclass(frozen=True)
class EqualConfigs:
    """Which configs take over whose answers, and, by config, the rules that cannot act."""

    leader_of: dict[str, str]
    inert: dict[str, tuple[InertRule, ...]]

    def notes(self) -> list[str]:
        """Returns what is worth knowing before the run: which rules cannot act and why, and who takes over answers."""
        configs_by_reason: dict[str, dict[str, None]] = {}
        for name, rules in self.inert.items():
            for each in rules:
                configs_by_reason.setdefault(each.reason, {})[name] = None
        found = [f"rules of {', '.join(names)} cannot act: {why}" for why, names in configs_by_reason.items()]
        for leader in dict.fromkeys(self.leader_of.values()):
            names = [name for name, followed in self.leader_of.items() if followed == leader]
            found.append(f"{', '.join(names)} take over the answers of {leader}; a few requests are checked")
        return found

    def computed_as(self, name: str) -> str:
        """Returns the config that is run in place of one: itself, unless it takes over another one's answers."""
        return self.leader_of.get(name, name)


def find_equal(task_run: TaskRun, configs: Sequence[ConfigSpec]) -> EqualConfigs:
    """Groups the configs of a scoring task by the rules that can act. On generative tasks every config is run."""
    if task_run.task.path != "scoring":
        return EqualConfigs({}, {})
    any_lm, requests = task_run.runner(configs[0]).lm(), [each for chunk in task_run.chunks for each in chunk.requests]
    lengths: list[ScoredLengths] = any_lm.scored_lengths(requests)
    decoding = task_run.session.decoding
    sizes = {"block_size": decoding.block_size, "prediction": decoding.prediction}
    leader_of: dict[str, str] = {}
    inert: dict[str, tuple[InertRule, ...]] = {}
    leaders: dict[tuple[Any, ...], str] = {}
    for config in configs:
        name, engine = config.name, task_run.runner(config).engine
        wanted = task_run.runner(config).settings.estimator
        inert[name] = inert_rules(engine.decoder.rules, lengths, estimator=wanted, **sizes)  # type: ignore[arg-type]
        acting = tuple(map(registry.describe, acting_rules(engine.decoder.rules, inert[name])))
        how: str = engine.check_estimator(wanted)  # drafts of any length are scored by the same forward
        if how == wanted:
            is_single = no_second_step(lengths, score_stop=False, estimator=wanted, **sizes)  # type: ignore[arg-type]
            how = "any" if is_single else engine.decoder.description
        leader = leaders.setdefault((how, acting, engine.decoding), name)
        if leader != name:
            leader_of[name] = leader
    return EqualConfigs(leader_of, inert)


def follow(cell: CellRun, leader: CellRun, chunks: Sequence[Chunk]) -> SpotCheck:
    """Takes over the leader's answers and checks some of them under the config's own rules."""
    checked = spot_check(cell, leader, chunks)
    timings = {each.chunk: each for each in leader.stored.own_timings}
    for chunk in chunks:
        if chunk.number not in cell.stored.records:
            cell.stored.append_chunk(chunk.number, leader.stored.records[chunk.number], timings[chunk.number])
    known = {each.key for each in cell.stored.timings}
    for timing in leader.stored.timings:
        if timing.key not in known:
            cell.stored.append_timing(timing)
    return checked


def spot_check(cell: CellRun, leader: CellRun, chunks: Sequence[Chunk]) -> SpotCheck:
    """Computes some requests under the config's own rules. Returns which ones differ, and the work they took."""
    requests: list[Instance] = []
    for chunk in chunks:
        if len(requests) >= SPOT_CHECKED:
            break
        requests += chunk.requests
    stored = {record.key: record for record in leader.stored.all_records}
    records, timing = cell.runner.run_chunk(requests, chunk=-1, samples=len(requests))
    different = [str(each.key) for each in records if each.loglikelihood != stored[each.key].loglikelihood]
    return SpotCheck(requests=len(records), different=different, row_layers=timing.row_layers)
