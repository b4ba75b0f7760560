"""The speed-up is about what the operations that were executed predict."""

from collections.abc import Iterator

from stepsaver.bench.audit.audited import AuditedTask, Finding

ORDER = 13
PREDICTION = 0.25


def findings(task: AuditedTask) -> Iterator[Finding]:
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
