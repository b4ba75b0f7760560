"""Tasks as a report reads them, made up: any number of configs and samples, with any text in them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from stepsaver.bench.audit import Finding
from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.statistics import Interval, median_interval
from stepsaver.evaluation.records import RequestKey, RequestRecord
from stepsaver.report.cells import ReportCell, ReportTask
from stepsaver.report.documents import Document, DocumentKey, TaskDocuments
from tests.bench import made_up

TASK = "made_up"
EXPERIMENT = """\
question: {question}
tasks: [made_up]
configs:
  grid:
    k: [1, 2, 3]
    layers: [first, middle, last]
  name: k{{k}}_{{layers}}
  rules: ["layer_reuse:k={{k}},layers={{layers}},mode=output"]
baseline: k1_first
success:
  confirm_if: {{speed_up: "> 1.2", drop_points: "< 5"}}
  reject_if: {{speed_up: "< 1.05", drop_points: "> 20"}}
"""

Text = Callable[[int, int], str]  # of a config's answer to a sample


def made_up_experiment(folder: Path, question: str = "Does it hold?") -> Experiment:
    """Nine configs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.yaml").write_text(EXPERIMENT.format(question=question), encoding="utf-8")
    return read_experiment(folder)


def summary_of(config: str, index: int, samples: int, rate: Interval, *, is_baseline: bool) -> Summary:
    accuracy, up, drop = 0.9 - 0.03 * index, 1 + 0.05 * index, 3.0 * index
    kinds = {"prefill": 900, "full": 6000 - 300 * index, "sub": 3000, "commit": 800}
    return made_up.summary(
        task=TASK,
        config=config,
        accuracy=accuracy,
        accuracy_interval=[accuracy - 0.02, accuracy + 0.02],
        samples=samples,
        baseline="k1_first",
        is_baseline=is_baseline,
        paired=made_up.SUMMARY["paired"] | {"drop_points": [drop, drop - 1, drop + 1]},
        speed_up={"tokens_per_s": [up, up - 0.02, up + 0.02], "seconds_per_sample": [up, up - 0.01, up + 0.02]},
        predicted=up + 0.01,
        rate=rate,
        tokens_before_stop=9_500,
        throughput=made_up.SUMMARY["throughput"] | {"decode_seconds": 100 / up, "tokens_per_s": 100 * up},
        cost=made_up.SUMMARY["cost"]
        | {
            "forwards": 1000 - 10 * index,
            "row_layers": sum(kinds.values()),
            "row_layers_reused": 300 * index,
            "by_kind": {
                kind: {"steps": rows // 100, "row_layers": rows, "row_layers_reused": 0, "flops": 1e5 * rows}
                for kind, rows in kinds.items()
            },
        },
        run_id=f"{index:012x}",
    )


def record_of(sample: int, text: str) -> RequestRecord:
    key = RequestKey(TASK, sample, 0, 0)
    return RequestRecord(key, "generation", "digest", prompt_tokens=5, tokens_cut=0, ids=(5, 6, 7), text=text)


def made_up_task(
    experiment: Experiment,
    *,
    samples: int = 12,
    answer: Text = lambda place, sample: f"the answer to {sample} is {sample + place // 3}",
    question: Callable[[int], str] = "What is {}?".format,
    subjects: Sequence[str] = ("algebra", "logic"),
    unfinished: dict[str, ReportCell] | None = None,
    findings: Sequence[Finding] = (),
) -> ReportTask:
    """Answers of the k=2 and k=3 configs are wrong; `unfinished` cells stand in the place of finished ones."""
    keys = [DocumentKey(TASK, sample) for sample in range(samples)]
    documents = {
        key: Document(question(key.document), str(key.document), subjects[key.document % len(subjects)], ())
        for key in keys
    }
    cells = []
    for place, config in enumerate(experiment.configs):
        if unfinished and config.name in unfinished:
            cells.append(unfinished[config.name])
            continue
        rates = [(float(minute), (40.0 if minute == 0 else 100.0) + place + minute) for minute in range(10)]
        rate = median_interval([each for _, each in rates])
        summary = summary_of(config.name, place, samples, rate, is_baseline=config.name == experiment.spec.baseline)
        records = tuple(record_of(key.document, answer(place, key.document)) for key in keys)
        scores = {key: float(place < 3) for key in keys}
        cells.append(ReportCell(config, "done", "", summary, tuple(rates), records, scores))
    return ReportTask(
        experiment, experiment.folder / "results", TASK, tuple(cells), tuple(findings), TaskDocuments(documents)
    )
