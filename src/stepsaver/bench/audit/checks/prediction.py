"""The speed-up is about what the executed operations predict, and what the machine's row costs predict."""

from collections.abc import Iterator

from stepsaver.bench.audit.evidence import Finding, TaskEvidence

ORDER = 13
# the field of a summary, what the message calls it, and how far the speed-up may be from it
PREDICTIONS = (
    ("predicted_speed_up", "its operations predict", 0.25),
    ("predicted_here", "what rows take here predicts", 0.1),
)


def findings(task: TaskEvidence) -> Iterator[Finding]:
    for cell in task.cells:
        summary = cell.summary
        if summary is None or summary.is_baseline:
            continue
        measured = summary.speed_up.tokens_per_s.value
        for name, by, most in PREDICTIONS:
            predicted = getattr(summary, name)
            if predicted and abs(measured / predicted - 1) > most:
                message = f"{cell.name} measured {measured:.2f}x where {by} {predicted:.2f}x"
                yield Finding("remark", "prediction", message)
