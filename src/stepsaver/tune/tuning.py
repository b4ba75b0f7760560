"""A tuning from its settings to its outcome: an experiment that grows with each candidate, a search, a confirmation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import yaml

from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.experiment_file import FILE, read_experiment
from stepsaver.bench.identity import run_id
from stepsaver.bench.session import Session
from stepsaver.bench.statistics import Interval, fewest_samples
from stepsaver.engine import registry
from stepsaver.engine.errors import UsageError
from stepsaver.engine.machine import device_name
from stepsaver.evaluation.recipe import Figure, MadeFor, Measured, Recipe, versions_here
from stepsaver.tune.confirm import MOST_ATTEMPTS, Attempt, Attempts, confirm
from stepsaver.tune.observed import Goal, drop_interval, speed_interval
from stepsaver.tune.problems import Problems, SplitProblems
from stepsaver.tune.search import search
from stepsaver.tune.space import Candidate, DeclaredSpace
from stepsaver.tune.trials import BASELINE, REFERENCE, BenchTrials, FreshTrials, Report

SHARE_OF_SEARCH = 0.5  # of the budget; the rest is for confirming
REFERENCE_SEARCHED = 2  # chunks on which autoregressive decoding is timed, before the search


@dataclass(frozen=True)
class Aim:
    """What the user asked for."""

    max_drop: float  # points
    confidence: float
    budget: float  # seconds

    @property
    def limit(self) -> float:
        return self.max_drop / 100


class Tuning:
    """One tuning in its folder. Whatever it runs is stored at once, and not run again. Its results are locked."""

    def __init__(
        self, experiment: Experiment, session: Session, problems: SplitProblems, aim: Aim, report: Report
    ) -> None:
        self.attempts = Attempts(experiment.folder, settings_of(experiment, problems, aim))
        self.experiment, self.session, self.problems = with_stored_configs(experiment), session, problems
        self.aim, self.report, self.started = aim, report, time.monotonic()
        self.configs = {config.name: config for config in self.experiment.configs}
        self.results = experiment.folder.resolve() / "results"
        self.space = space_of(session, problems)

    def run(self) -> dict[str, Any]:
        """Returns what is written as `tuning.json`: everything that was tried, and what came of it."""
        write_experiment(self.experiment)
        searched = self._trials(self.problems.search, SHARE_OF_SEARCH * self.aim.budget)
        fresh = FreshTrials(self._trials(self.problems.fresh, self.aim.budget), searched)
        self._prepare(searched)
        reference = searched.observed(REFERENCE)
        floor = max(1.0, reference.speed_up if reference else 1.0)
        goal = Goal(self.aim.limit, self.aim.confidence, self.problems.fresh.count, floor)
        ranked = search(self.space, searched, goal)
        if self.attempts.confirmed is None:
            confirm(self.attempts, ranked, fresh, goal)
        return self._document(searched, [name for name, _ in ranked])

    def _trials(self, problems: Problems, seconds: float) -> BenchTrials:
        return BenchTrials(problems, self.results, self._config_of, self.started + seconds, self.report)

    def _prepare(self, trials: BenchTrials) -> None:
        """Measures what `auto` decides by, and refuses a budget that is too small for a verdict."""
        aim, least = self.aim, fewest_samples(self.aim.limit, self.aim.confidence)
        if least > self.problems.fresh.count:
            raise UsageError(
                f"a drop below {aim.max_drop:g} points at {100 * aim.confidence:g} % needs at least {least} "
                f"fresh problems, and there are {self.problems.fresh.count}"
            )
        self.session.measured_curve()
        for chunk in range(min(REFERENCE_SEARCHED, trials.chunks)):
            trials.run([REFERENCE], chunk)
        needed = 2 * least * trials.seconds_per_problem(BASELINE) / (1 - SHARE_OF_SEARCH)
        if needed > aim.budget:
            raise UsageError(
                f"--budget {aim.budget / 60:.1f} min is too small for a verdict: the {least} fresh problems that "
                f"{aim.max_drop:g} points need at least, and a search, take about {needed / 60:.1f} min here"
            )

    def _config_of(self, name: str) -> ConfigSpec | None:
        """Returns the config of a candidate, after writing it to the experiment's file; None if nobody knows it."""
        if name not in self.configs and name in self.space.known:
            self.configs[name] = config_of(self.space.known[name])
            self.experiment = replace(self.experiment, configs=tuple(self.configs.values()))
            write_experiment(self.experiment)
        return self.configs.get(name)

    def _recipe(self, attempt: Attempt) -> Recipe:
        config, session = self.configs[attempt.name], self.session
        decoder = config.decoder(self.experiment.spec.decoding)
        assert attempt.speed_up, "a confirmed attempt has ended"
        assert attempt.drop
        return Recipe(
            decode=decoder.text,
            rules=config.rules,
            policy=registry.describe(decoder.policy) if decoder.policy else None,
            sub_block_size=config.sub_block_size or session.decoding.sub_block_size,
            join=config.join or self.experiment.spec.decoding.join,
            batch_size=session.batch_size,
            made_for=MadeFor(
                model=session.name,
                dtype=str(session.model.dtype).removeprefix("torch."),
                device=session.device.type,
                machine=device_name(session.device),
                versions=versions_here(),
            ),
            measured=Measured(
                measure=self.problems.fresh.measure,
                task=self.problems.fresh.task_run.task.name,
                problems=attempt.problems,
                confidence=attempt.confidence,
                attempt=attempt.number,
                against=session.engine(self.experiment, self.configs[BASELINE]).decoder.description,
                max_drop=self.aim.max_drop,
                speed_up=_figure(attempt.speed_up, 4),
                over_autoregressive=_figure(attempt.over_reference, 4) if attempt.over_reference else None,
                drop_points=_figure(attempt.drop.scaled(100), 3),
            ),
        )

    def _document(self, searched: BenchTrials, ranked: list[str]) -> dict[str, Any]:
        spec, confirmed = self.experiment.spec, self.attempts.confirmed
        recipe = self._recipe(confirmed) if confirmed else None
        observed = {name: seen for name in self.space.known if (seen := searched.observed(name))}
        never_run = [name for name in self.space.known if name not in observed]
        outcome, sentence = self._outcome(recipe, ranked, never_run, len(observed))
        return {
            "experiment": self.experiment.name,
            "question": spec.question,
            "model": spec.model,
            "task": spec.tasks[0],
            "batch_size": spec.batch_size,
            "max_drop": self.aim.max_drop,
            "measure": self.problems.search.measure,
            "sentence": sentence,
            "outcome": outcome,
            "seconds": time.monotonic() - self.started,
            "candidates": [
                {
                    "name": name,
                    "problems": seen.problems,
                    "speed_up": _finite((seen.speed_up, *speed_interval(seen.speed_ups, 0.95)[1:])),
                    "drop_points": list(drop_interval(seen, 0.95).scaled(100)),
                    "rank": ranked.index(name) + 1 if name in ranked else None,
                }
                for name, seen in sorted(observed.items(), key=lambda each: -each[1].speed_up)
            ],
            "never_run": never_run,
            "attempts": [
                {**each.model_dump(), "speed_up": each.speed_up and _finite(each.speed_up)}
                for each in self.attempts.made
            ],
            "recipe": recipe.model_dump(mode="json", exclude_none=True) if recipe else None,
        }

    def _outcome(
        self, recipe: Recipe | None, ranked: list[str], never_run: list[str], observed: int
    ) -> tuple[str, str]:
        """Returns the outcome in a word and in a sentence."""
        limit = f"{self.aim.max_drop:g} point{'s' * (self.aim.max_drop != 1)} of {self.problems.search.measure}"
        made = self.attempts.made
        if recipe is not None and self.attempts.confirmed:
            return "confirmed", f"Confirmed: {self.attempts.confirmed.name}: {recipe.measured}."
        undecided = [each.name for each in made if each.outcome in ("undecided", "begun")]
        waiting = {*ranked} - {each.name for each in made} if len(made) < MOST_ATTEMPTS else set()
        why = [f"the fresh problems do not decide about {', '.join(undecided)}"] if undecided else []
        why += [f"no time was left to confirm {len(waiting)} candidates"] if waiting else []
        why += [f"{len(never_run)} were never run"] if never_run else []
        if why:
            return "undecided", f"Undecided: nothing is confirmed to keep within {limit} yet: {'; '.join(why)}."
        return "rejected", f"Nothing within {limit} beats plain decoding: of {observed} candidates none was confirmed."


def space_of(session: Session, problems: SplitProblems) -> DeclaredSpace:
    is_scored = problems.search.task_run.task.path == "scoring"
    return DeclaredSpace(session.decoding, session.model.config.layers, is_scored=is_scored)


def settings_of(experiment: Experiment, problems: SplitProblems, aim: Aim) -> dict[str, Any]:
    """What attempts are made with. A tuning that is run again with anything else is another one."""
    spec, fresh = experiment.spec, problems.fresh.task_run
    return {
        "max_drop": aim.max_drop,
        "confidence": aim.confidence,
        "batch_size": spec.batch_size,
        "model": spec.model,
        "task": spec.tasks[0],
        "answer": problems.fresh.pattern and problems.fresh.pattern.pattern,
        "version of model, data or engine": run_id(fresh.identity(experiment.config(BASELINE))),
    }


def _finite(interval: Sequence[float]) -> list[float]:
    """The value alone where it has no bounds, which JSON does not know."""
    return list(interval) if isfinite(interval[-1]) else [interval[0]]


def _figure(interval: Interval, digits: int) -> Figure:
    return Figure(**{name: round(value, digits) for name, value in interval._asdict().items()})


def config_of(candidate: Candidate) -> ConfigSpec:
    return ConfigSpec(
        name=candidate.name,
        decode=candidate.decoder.text if candidate.decoder else None,
        rules=tuple(map(registry.describe, candidate.rules)),
        policy=registry.describe(candidate.policy) if candidate.policy else None,
        sub_block_size=candidate.value("sub"),
        join=candidate.value("join"),
    )


def with_stored_configs(experiment: Experiment) -> Experiment:
    """Returns the experiment with the candidates that its folder has from before. A search of another version may not
    try them any more, but one of them may be the winner.
    """
    try:
        stored = read_experiment(experiment.folder).configs
    except (UsageError, OSError):  # none, or it is damaged: it is written anew
        return experiment
    known = {config.name for config in experiment.configs}
    return replace(experiment, configs=(*experiment.configs, *(each for each in stored if each.name not in known)))


def write_experiment(experiment: Experiment) -> None:
    """Writes the experiment's file with every config that was tried so far."""
    spec = experiment.spec.model_copy(update={"configs": list(experiment.configs)})
    content = spec.model_dump(mode="json", exclude_defaults=True)
    head = "# Written by `stepsaver tune`: every candidate that was run.\n"
    write_beside(experiment.folder / FILE, head + yaml.safe_dump(content, sort_keys=False, width=110))
