"""Traces of an experiment's first samples: the baseline and another config, played in step beside the report."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stepsaver.bench.experiment import ConfigSpec
from stepsaver.bench.session import Session
from stepsaver.engine.engine import Engine
from stepsaver.evaluation.answering import GenerationParameters, read_parameters
from stepsaver.evaluation.growing_text import StopStrings
from stepsaver.evaluation.tokenizer import TextTokenizer
from stepsaver.report.cells import ReportTask
from stepsaver.report.documents import DocumentKey
from stepsaver.report.html_pages import trace_page
from stepsaver.report.trace_data import Run, TraceRecorder, trace_document


@dataclass(frozen=True)
class TracedSamples:
    """A page and the documents that it plays, in its order."""

    path: Path
    label: str
    documents: list[DocumentKey]


def config_to_trace(task: ReportTask, name: str | None) -> ConfigSpec:
    """Returns the named config, or the fastest one that is done, controls aside: they show nothing of reuse."""
    experiment = task.experiment
    if name is not None:
        return experiment.config(name)
    tried = [each for each in task.verdict().configs if each.outcome != "control"]
    judged = sorted(tried, key=lambda each: each.speed_up.value)
    known = {*experiment.baselines, experiment.reference}
    others = [each.name for each in experiment.configs if each.name not in known]
    return experiment.config(judged[-1].config if judged else (others or [experiment.spec.baseline])[0])


def write_traces(
    session: Session, task: ReportTask, config: ConfigSpec, *, count: int, path: Path
) -> TracedSamples | None:
    """Decodes the first samples with the config and its baseline. None for tasks that generate nothing."""
    loaded, experiment = task.documents.loaded, task.experiment
    if loaded is None or loaded.path != "generation":
        return None
    members = loaded.harness["tasks"].values()
    requests = list(islice((request for member in members for request in member.instances), count))
    default, limit = experiment.spec.decoding.max_new_tokens, experiment.spec.max_new_tokens
    prompts = [session.tokenizer.encode(request.args[0]) for request in requests]
    parameters = [
        read_parameters(request.args[1], default_new_tokens=default, token_limit=limit) for request in requests
    ]
    configs = [experiment.config(experiment.baseline_of(config.name)), config]
    engines = [session.engine(experiment, each) for each in configs]
    runs = [
        [_decode(engine, session.tokenizer, *each) for each in zip(prompts, parameters, strict=True)]
        for engine in engines
    ]
    document = trace_document(task.model, prompts, engines, runs, session.tokenizer.token_text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(trace_page(document), encoding="utf-8")
    keys = [DocumentKey(request.task_name or loaded.name, request.doc_id) for request in requests]
    return TracedSamples(path, f"{configs[0].name} and {config.name}", keys)


def _decode(engine: Engine, tokenizer: TextTokenizer, prompt: list[int], parameters: GenerationParameters) -> Run:
    """Decodes one sample alone, with the evaluation's settings: its text does not depend on a batch."""
    recorder = TraceRecorder(engine)
    stops = StopStrings(tokenizer, parameters.until, block_size=engine.decoding.block_size)
    completions = list(
        engine.generate(
            [prompt],
            max_new_tokens=parameters.max_new_tokens,
            sampling=parameters.sampling,
            finished=stops.are_reached,
            on_step=recorder,
        )
    )
    return recorder.runs([prompt], completions)[0]
