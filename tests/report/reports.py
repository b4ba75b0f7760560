"""Tasks as a report reads them, made up: any number of configs and samples, with any text in them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepsaver.bench.audit import Finding
from stepsaver.bench.experiment.reading import read_experiment
from stepsaver.bench.experiment.spec import Experiment
from stepsaver.bench.judging.statistics import median_interval
from stepsaver.evaluation.records import RequestKey, RequestRecord
from stepsaver.report.cells import Details, ReportCell, ReportTask
from stepsaver.report.documents import Document, DocumentKey, TaskDocuments

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


def summary_of(config: str, place: int, samples: int, *, is_baseline: bool) -> dict[str, Any]:
    accuracy, up = 0.9 - 0.03 * place, 1 + 0.05 * place
    kinds = {"prefill": 900, "full": 6000 - 300 * place, "sub": 3000, "commit": 800}
    return {
        "task": TASK,
        "config": config,
        "timestamp": "2026-01-20T10:00:00Z",
        "accuracy": accuracy,
        "accuracy_metric": "exact_match,none",
        "accuracy_interval": [accuracy - 0.02, accuracy + 0.02],
        "samples": samples,
        "is_baseline": is_baseline,
        "paired": {
            "drop_points": [3.0 * place, 3.0 * place - 1, 3.0 * place + 1],
            "lost": 3,
            "won": 1,
            "mcnemar_p": 0.5,
        },
        "speed_up": {"tokens_per_s": [up, up - 0.02, up + 0.02], "seconds_per_sample": [up, up - 0.01, up + 0.02]},
        "speed_up_chunks": 40,
        "timed_again": [],
        "chunks": 4,
        "chunks_not_comparable": 0,
        "batch_invariance": {"same": 0, "checked": 0},
        "confirmation_p": 0.5,
        "predicted_speed_up": up + 0.01,
        "ceiling": None if is_baseline else up + 0.3,
        "throughput": {
            "tokens": 10_000,
            "requests": samples,
            "decode_seconds": 100 / up,
            "tokens_per_s": 100 * up,
            "requests_per_s": 1.0,
            "loading_seconds": 1.0,
            "warm_up_seconds": 0.5,
        },
        "cost": {
            "forwards": 1000 - 10 * place,
            "denoising_steps": 900,
            "flops": 1e9,
            "row_layers": sum(kinds.values()),
            "row_layers_reused": 300 * place,
            "by_kind": {kind: {"row_layers": rows, "flops": 1e5 * rows} for kind, rows in kinds.items()},
        },
        "peak_memory_bytes": 2**28,
        "gpu_info": None,
        "git": {"commit": "0" * 40, "dirty": False},
        "environment": {"python": "3.11", "machine": "x86_64", "torch": "2"},
        "model_args": {"model": "model", "dtype": "torch.float32"},
        "eval_params": {
            "limit": None,
            "batch_size": 32,
            "seed": 0,
            "rules": ["layer_reuse:k=2"],
            "policy": "threshold:threshold=0.9",
        },
        "run_id": f"{place:012x}",
        "identity": {
            "model": "abc",
            "source": "def",
            "rules": ["layer_reuse:k=2"],
            "policy": "threshold:threshold=0.9",
            "decoding": {
                "block_size": 32,
                "sub_block_size": 8,
                "mask_id": 1,
                "prefix_cache": True,
                "block_cache": True,
                "stop_ids": [1, 2],
            },
            "layers": 28,
            "task": TASK,
            "dtype": "torch.float32",
            "estimator": "trajectory",
            "device": "cpu",
        },
        "equal_to": None,
        "inert_rules": [],
    }


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
        summary = summary_of(config.name, place, samples, is_baseline=config.name == experiment.spec.baseline)
        rates = [(float(minute), (40.0 if minute == 0 else 100.0) + place + minute) for minute in range(10)]
        summary["rate"] = list(median_interval([rate for _, rate in rates]))
        details = Details(
            rates=rates,
            prefill_seconds=5.0,
            tokens=(3.0, 20.0, 40.0, 60.0, 96.0, 42.0),
            subjects=dict.fromkeys(subjects, (3.0, 5)),
        )
        records = tuple(record_of(key.document, answer(place, key.document)) for key in keys)
        marks = {key: float(place < 3) for key in keys}
        cells.append(ReportCell(config, "done", "", summary, details, records, marks))
    return ReportTask(
        experiment, experiment.folder / "results", TASK, tuple(cells), tuple(findings), TaskDocuments(documents)
    )
