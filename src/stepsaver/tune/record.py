"""`tuning.json`: everything that a tuning tried and what came of it, for its page and for whoever reads it later."""

from typing import Any

from stepsaver.bench.experiment import Experiment
from stepsaver.tune.race import drop_interval, speed_interval
from stepsaver.tune.tuning import Outcome


def tuning_document(experiment: Experiment, outcome: Outcome, measure: str) -> dict[str, Any]:
    ranks = {name: rank for rank, (name, _) in enumerate(outcome.found.ranked, 1)}
    confirmed = next((each for each in outcome.attempts if each.outcome == "confirmed"), None)
    candidates = []
    for name, observed in outcome.observed.items():
        drop, speed = drop_interval(observed, 0.95).scaled(100), speed_interval(observed, 0.95)
        is_timed = len(observed.speed_ups) > 1
        candidates.append(
            {
                "name": name,
                "problems": observed.problems,
                "speed_up": observed.speed_up,
                "speed_up_interval": [speed.low, speed.high] if is_timed else None,
                "predicted": observed.predicted,
                "drop_points": drop.value,
                "drop_interval": [drop.low, drop.high],
                "rank": ranks.get(name),
                "out": outcome.found.out.get(name),
            }
        )
    return {
        "experiment": experiment.name,
        "question": experiment.spec.question,
        "model": experiment.spec.model,
        "task": experiment.spec.tasks[0],
        "batch_size": experiment.spec.batch_size,
        "max_drop": experiment.spec.success.confirm_if.drop_points.bound,
        "measure": measure,
        "sentence": outcome.sentence,
        "outcome": "confirmed"
        if confirmed
        else "undecided"
        if outcome.sentence.startswith("Undecided")
        else "rejected",
        "seconds": outcome.seconds,
        "candidates": sorted(candidates, key=lambda each: -each["speed_up"]),
        "not_run": [*outcome.found.never_run, *(n for n in outcome.found.out if n not in outcome.observed)],
        "attempts": [
            {
                "name": each.name,
                "number": each.number,
                "confidence": each.confidence,
                "problems": each.problems,
                "outcome": each.outcome,
                "reason": each.reason,
                "speed_up": list(each.speed_up),
                "drop_points": list(each.drop.scaled(100)),
            }
            for each in outcome.attempts
        ],
        "recipe": outcome.recipe.model_dump(mode="json", exclude_none=True) if outcome.recipe else None,
    }
