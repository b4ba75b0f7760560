"""A tuning from its settings to its outcome: an experiment that grows with each candidate, a search, a confirmation."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from stepsaver.bench.calibration import calibrate
from stepsaver.bench.durable import write_beside
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.experiment_file import FILE, read_experiment
from stepsaver.bench.identity import device_name
from stepsaver.bench.session import Session
from stepsaver.bench.stored_costs import store_row_costs
from stepsaver.engine import registry
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.recipe import Figure, MadeFor, Measured, Recipe, versions_here
from stepsaver.tune.confirm import MOST_ATTEMPTS, Attempt, confidence_of, confirm, least_problems
from stepsaver.tune.ledger import Ledger
from stepsaver.tune.problems import Problems, SplitProblems
from stepsaver.tune.race import Goal, Observed
from stepsaver.tune.search import Found, search
from stepsaver.tune.space import Candidate, DeclaredSpace
from stepsaver.tune.trials import BASELINE, BenchTrials, Report

SHARE_OF_SEARCH = 0.5  # of the budget; the rest is for confirming
CALIBRATED_ON, CALIBRATED_TOKENS = 8, 64


@dataclass(frozen=True)
class Aim:
    """What the user asked for."""

    max_drop: float  # points
    confidence: float
    budget: float  # seconds

    @property
    def limit(self) -> float:
        return self.max_drop / 100


@dataclass
class Outcome:
    """The outcome of a tuning: a confirmed candidate, or why there is none."""

    found: Found
    attempts: list[Attempt]
    observed: dict[str, Observed] = field(default_factory=dict)  # on the search's problems
    recipe: Recipe | None = None
    sentence: str = ""
    seconds: float = 0.0


class Tuning:
    """One tuning in its folder. Whatever it runs is stored at once, and not run again."""

    def __init__(
        self, experiment: Experiment, session: Session, problems: SplitProblems, aim: Aim, report: Report
    ) -> None:
        self.experiment, self.session, self.problems, self.aim, self.report = experiment, session, problems, aim, report
        self.results = experiment.folder.resolve() / "results"
        self.configs = {config.name: config for config in experiment.configs}
        self.started = time.monotonic()
        is_scored = problems.search.task_run.task.path == "scoring"
        self.space = DeclaredSpace(session.decoding, session.model.config.layers, is_scored=is_scored)

    @property
    def measure(self) -> str:
        return self.problems.search.measure

    def run(self, ledger: Ledger) -> Outcome:
        aim = self.aim
        settled = next((each for each in ledger.attempts if each.outcome == "confirmed"), None)
        trials = self._trials(self.problems.search, self.started + SHARE_OF_SEARCH * aim.budget)
        self._prepare(trials)
        goal = Goal(aim.limit, aim.confidence, self.problems.fresh.count)
        found = search(self.space, trials, goal)
        outcome = Outcome(found, list(ledger.attempts))
        if settled is None:
            outcome.attempts += self._confirm(found, ledger)
        outcome.observed = {name: each for name in self.space.known if (each := trials.observed(name))}
        confirmed = next((each for each in outcome.attempts if each.outcome == "confirmed"), None)
        if confirmed is not None:
            outcome.recipe = self._recipe(confirmed)
        outcome.sentence = self._sentence(outcome, trials)
        outcome.seconds = time.monotonic() - self.started
        return outcome

    def _trials(self, problems: Problems, until: float) -> BenchTrials:
        return BenchTrials(problems, self.results, self._config_of, until, self.report)

    def _prepare(self, trials: BenchTrials) -> None:
        """Measures row costs, proposes layer groups, and refuses a budget that is too small for a verdict."""
        self.report("measuring what rows take")
        costs = self.session.measure_rows()
        trials.run([], 0)
        store_row_costs(self.results / self.problems.search.task_run.folder_name, self.session.identity, costs)
        each = trials.seconds_per_problem(BASELINE)
        assert each is not None, "the baseline has a chunk"
        self._require_time(each)
        self.report("measuring drift")
        self.space.layer_groups = tuple(self._layer_groups())

    def _require_time(self, seconds_per_problem: float) -> None:
        least = least_problems(self.aim.limit, self.aim.confidence)
        if least > self.problems.fresh.count:
            raise UsageError(
                f"a drop below {self.aim.max_drop:g} points at {100 * self.aim.confidence:g} % needs at least {least} "
                f"fresh problems, and there are {self.problems.fresh.count}"
            )
        needed = 2 * least * seconds_per_problem / (1 - SHARE_OF_SEARCH)
        if needed > self.aim.budget:
            raise UsageError(
                f"--budget {self.aim.budget / 60:.1f} min is too small for a verdict: the {least} fresh problems that "
                f"{self.aim.max_drop:g} points need at least, and a search, take about {needed / 60:.1f} min here"
            )

    def _layer_groups(self) -> list[str]:
        requests = self.problems.search.chunks[0].requests[:CALIBRATED_ON]
        if self.problems.search.task_run.task.path != "generation":
            return []
        prompts = [Prompt(tuple(self.session.tokenizer.encode(each.args[0]))) for each in requests]
        engine = Engine(self.session.model, batch_size=self.session.batch_size, decoding=self.session.decoding)
        try:
            return list(calibrate(engine, prompts, max_new_tokens=CALIBRATED_TOKENS)["groups"])
        except UsageError:  # no block took a second step: nothing to reuse either
            return []

    def _config_of(self, name: str) -> ConfigSpec:
        """Returns the config of a candidate, after writing it to the experiment's file."""
        if name not in self.configs:
            self.configs[name] = config_of(self.space.candidate(name))
            self.experiment = replace(self.experiment, configs=tuple(self.configs.values()))
            write_experiment(self.experiment)
        return self.configs[name]

    def _confirm(self, found: Found, ledger: Ledger) -> Iterator[Attempt]:
        trials = self._trials(self.problems.fresh, self.started + self.aim.budget)
        done = {attempt.name for attempt in ledger.attempts}
        ranked = [each for each in found.ranked if each[0] not in done]
        begun = ledger.unfinished.name if ledger.unfinished else None
        ranked.sort(key=lambda each: each[0] != begun)
        is_resumed = bool(ranked) and ranked[0][0] == begun

        def trial(name: str, number: int, problems: int) -> Observed | None:
            size = len(trials.problems.chunks[0].samples)
            affordable = self._affordable(trials, name)
            least = least_problems(self.aim.limit, confidence_of(number, self.aim.confidence))
            if min(problems, affordable) < least and name != begun:
                return None
            wanted = ledger.begin(name, number, min(problems, affordable))
            chunks = min(trials.chunks, -(-wanted // size))
            for chunk in range(chunks):
                trials.run([name], chunk)
            return trials.observed_on(name, chunks)

        for attempt in confirm(
            ranked,
            trial,
            limit=self.aim.limit,
            confidence=self.aim.confidence,
            most_problems=self.problems.fresh.count,
            attempts_before=len(ledger.entries) - is_resumed,
        ):
            ledger.end(attempt)
            yield attempt

    def _affordable(self, trials: BenchTrials, name: str) -> int:
        """Returns how many fresh problems the time left allows, by the timings of the search."""
        searched = self._trials(self.problems.search, 0.0)
        searched.run([name], 0)  # stored already: this only opens the cells
        each = [searched.seconds_per_problem(one) or 0.0 for one in (BASELINE, name)]
        return int(max(trials.seconds_left(), 0.0) / max(sum(each), 1e-9))

    def _recipe(self, attempt: Attempt) -> Recipe:
        config, session = self.configs[attempt.name], self.session
        decoder = config.decoder(self.experiment.spec.decoding)
        drop = attempt.drop.scaled(100)
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
                drop_points=_figure(drop, 3),
            ),
        )

    def _sentence(self, outcome: Outcome, trials: BenchTrials) -> str:
        limit = f"{self.aim.max_drop:g} point{'s' * (self.aim.max_drop != 1)} of {self.measure}"
        if outcome.recipe is not None and outcome.recipe.measured is not None:
            name = next(each.name for each in outcome.attempts if each.outcome == "confirmed")
            return f"Confirmed: {name}: {outcome.recipe.measured}."
        undecided = [each for each in outcome.attempts if each.outcome == "undecided"]
        tried = {each.name for each in outcome.attempts}
        untried = [name for name, _ in outcome.found.ranked if name not in tried]
        if outcome.found.never_run and not undecided:
            many = len(outcome.found.never_run) + len(untried)
            return f"Undecided: nothing keeps within {limit} yet, and there was no time to try {many} candidates."
        if undecided or (untried and len(outcome.attempts) < MOST_ATTEMPTS):
            return (
                f"Undecided: nothing is confirmed to keep within {limit} yet. {self._what_is_needed(outcome, trials)}"
            )
        return f"Nothing within {limit} beats plain decoding: of {len(outcome.observed)} candidates none was confirmed."

    def _what_is_needed(self, outcome: Outcome, trials: BenchTrials) -> str:
        """Says how much more would decide about the most promising candidate."""
        name, searched = outcome.found.ranked[0] if outcome.found.ranked else ("", None)
        undecided = next((each for each in outcome.attempts if each.outcome == "undecided"), None)
        drop = undecided.drop.value if undecided else searched.drop if searched else 0.0
        if drop >= self.aim.limit:
            return "The most promising candidate lies beyond the limit as measured."
        number = len(outcome.attempts) + 1
        problems = least_problems(self.aim.limit, confidence_of(number, self.aim.confidence))
        if undecided is not None:
            width = (undecided.drop.high - undecided.drop.value) / (self.aim.limit - drop)
            problems, name = max(problems, int(undecided.problems * width**2) + 1), undecided.name
        each = [trials.seconds_per_problem(one) or 0.0 for one in (BASELINE, name)]
        minutes = problems * sum(each) / (1 - SHARE_OF_SEARCH) / 60
        return f"About {problems} fresh problems, a budget of {minutes:.0f} min, would decide about {name}."


def _figure(interval: Any, digits: int) -> Figure:
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
    content = experiment.spec.model_dump(mode="json", exclude_defaults=True)
    bounds = ("confirm_if", "reject_if")
    success = {name: getattr(experiment.spec.success, name) for name in bounds}
    content["success"] = {
        name: {"speed_up": str(each.speed_up), "drop_points": str(each.drop_points)} for name, each in success.items()
    }
    content["configs"] = [each.model_dump(mode="json", exclude_defaults=True) for each in experiment.configs]
    head = "# Written by `stepsaver tune`: every candidate that was run.\n"
    write_beside(Path(experiment.folder) / FILE, head + yaml.safe_dump(content, sort_keys=False, width=110))
