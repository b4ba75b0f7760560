"""One process, one model: what all configs of a run share."""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from lm_eval.api.instance import Instance

from stepsaver.bench.documents import DecodingIdentity, Identity, Timing
from stepsaver.bench.experiment import OWN_DECODING, ConfigSpec, Experiment, ExperimentSpec
from stepsaver.bench.folders import task_folder
from stepsaver.bench.identity import folder_hash, gpu_name, library_versions, peak_memory, plugin_hashes, source_hash
from stepsaver.bench.timings import predicted_seconds
from stepsaver.engine import registry
from stepsaver.engine.backends import Backend, backend_for
from stepsaver.engine.backends.gpu.choice import fused_backend
from stepsaver.engine.cost import cost_by_kind, trace_cost
from stepsaver.engine.curve import Curve, measure_curve
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Weights
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.machine import OtherWork
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.adapter import AdapterSettings, StepsaverLM
from stepsaver.evaluation.answering import Meter
from stepsaver.evaluation.evaluate import EvaluationOptions, build_requests
from stepsaver.evaluation.open_model import open_model
from stepsaver.evaluation.records import InferencePath, RequestRecord
from stepsaver.evaluation.task_loading import LoadedTask
from stepsaver.evaluation.tokenizer import TextTokenizer

Item = TypeVar("Item")


@dataclass(eq=False)
class Session:
    """A loaded model with its tokenizer. Timings of one session can be compared with each other."""

    identity: str
    model: Transformer
    folder: Path
    model_hash: str
    device: torch.device
    weights: Weights
    tokenizer: TextTokenizer
    decoding: DecodingSettings
    batch_size: int
    loading_seconds: float
    is_alone: bool = True  # on its machine, as far as this run knows, so that its timings can be compared
    name: str = ""  # of the model, as the user gave it
    curve: Curve | None = None  # of this machine, once measured or given; never if other shards share it
    repeat: int = 0  # 0: the run that the samples come from

    def measured_curve(self, stored: Curve | None = None) -> Curve:
        """Returns what forwards cost here: measured once, before the first chunk, unless what is stored fits."""
        assert self.is_alone, "what is measured while others run says nothing about the machine"
        if self.curve is None and stored and stored.is_of(self.model, self.batch_size):
            self.curve = stored
        if self.curve is None:
            self.curve = measure_curve(self.model, decoding=self.decoding, batch_size=self.batch_size)
        return self.curve

    def engine(self, experiment: Experiment, config: ConfigSpec) -> Engine:
        own = {name: value for name in OWN_DECODING if (value := getattr(config, name)) is not None}
        decoding = replace(self.decoding, join=config.join or experiment.spec.decoding.join, **own)
        if decoding.block_size % decoding.sub_block_size:
            raise UsageError(
                f"config {config.name}: sub-block size {decoding.sub_block_size} does not divide the block size "
                f"{decoding.block_size}"
            )
        return Engine(
            self.model,
            decoder=config.decoder(experiment.spec.decoding),
            batch_size=self.batch_size,
            decoding=decoding,
            curve=self.curve,
        )


def open_session(
    experiment: Experiment,
    *,
    model_name: str,
    has_weights: bool = True,
    is_alone: bool = True,
    repeat: int = 0,
    loaded: Transformer | None = None,
) -> Session:
    """Loads the experiment's model or another one, unless it is `loaded`. Without weights it can plan but not run."""
    spec = experiment.spec
    opened = open_model(
        model_name,
        device=spec.device,
        dtype=spec.dtype,
        weights=spec.weights,
        compile=spec.compile,
        block_size=spec.decoding.block_size,
        sub_block_size=spec.decoding.sub_block_size,
        mask_id=spec.decoding.mask_id,
        prefix_cache=spec.decoding.prefix_cache,
        block_cache=spec.decoding.block_cache,
        join=spec.decoding.join,
    )
    tokenizer = opened.tokenizer  # a folder without one is reported before the weights are read
    model_hash = folder_hash(opened.folder)
    started = time.perf_counter()
    model = loaded or (opened.load() if has_weights else opened.outline())
    loading = time.perf_counter() - started
    return Session(
        uuid.uuid4().hex[:12],
        model,
        opened.folder,
        model_hash,
        opened.device,
        opened.weights,
        tokenizer,
        opened.decoding,
        spec.batch_size if model_name == spec.model else spec.batch_size_elsewhere,
        loading,
        is_alone,
        model_name,
        repeat=repeat,
    )


class ConfigRunner:
    """One config in a session: runs a chunk and says what it took."""

    def __init__(self, session: Session, experiment: Experiment, config: ConfigSpec, task: LoadedTask) -> None:
        spec = experiment.spec
        self.session, self.experiment, self.config = session, experiment, config
        self.path: InferencePath = task.path
        self.settings = AdapterSettings(
            default_new_tokens=spec.decoding.max_new_tokens,
            token_limit=spec.max_new_tokens,
            estimator=experiment.estimator_of(config, task.name),
            show_progress=False,
        )
        self._warm_up_seconds = 0.0
        self._engine = session.engine(experiment, config)
        if task.path == "scoring":
            self._engine.check_estimator(self.settings.estimator)

    @property
    def engine(self) -> Engine:
        """Another one once it is measured what a forward costs here, by which drafts and joins are chosen."""
        if self._engine.curve is not self.session.curve:
            self._engine = self.session.engine(self.experiment, self.config)
        return self._engine

    def lm(
        self,
        *,
        known: Iterable[RequestRecord] = (),
        on_record: Callable[[RequestRecord], None] | None = None,
        meter: Meter | None = None,
    ) -> StepsaverLM:
        return StepsaverLM(
            self.engine, self.session.tokenizer, settings=self.settings, known=known, on_record=on_record, meter=meter
        )

    def run_chunk(
        self, requests: Sequence[Instance], *, chunk: int, samples: int
    ) -> tuple[list[RequestRecord], Timing]:
        """Returns the answers to a chunk's requests, and their timing. Warm-up is not counted."""
        found: list[RequestRecord] = []
        meter = Meter(self.path, Trace(), warm_up_seconds=self._warm_up_seconds)
        lm = self.lm(on_record=found.append, meter=meter)
        others = OtherWork()
        if self.path == "generation":
            lm.generate_until(list(requests), disable_tqdm=True)
        else:
            lm.loglikelihood(list(requests), disable_tqdm=True)
        assert len(found) == len(requests), "every request has an answer"
        self._warm_up_seconds = meter.warm_up_seconds
        return sorted(found, key=lambda record: record.key), self._timing(meter, chunk, samples, others.cores())

    def _timing(self, meter: Meter, chunk: int, samples: int, other_cores: float | None) -> Timing:
        trace, config = meter.trace, self.engine.model.config
        cost = trace_cost(config, trace, self.engine.model.dtype.itemsize, self.engine.model.bytes_per_weight)
        curve = self.session.curve
        return Timing(
            chunk=chunk,
            session=self.session.identity,
            comparable=self.session.is_alone,
            when=time.time(),
            samples=samples,
            requests=meter.requests,
            tokens=meter.tokens,
            seconds=trace.decode_seconds,
            predicted_seconds=predicted_seconds(curve, config, trace.records) if curve else None,
            prefill_seconds=trace.prefill_seconds,
            warm_up_seconds=meter.warm_up_seconds,
            forwards=cost.forwards,
            denoising_steps=cost.steps,
            flops=cost.flops,
            row_layers=cost.mlp_row_layers,
            row_layers_reused=cost.mlp_row_layers_reused,
            by_kind=cost_by_kind(config, trace),
            sample_forwards=trace.sample_forwards,
            planning_seconds=trace.planning_seconds,
            peak_memory_bytes=peak_memory(self.engine.model.device),
            loading_seconds=self.session.loading_seconds,
            gpu=gpu_name(self.engine.model.device),
            other_cores=other_cores,
            threads=torch.get_num_threads(),
            repeat=self.session.repeat,
        )


@dataclass(frozen=True)
class SampleKey:
    """A document of a task, or of one of the tasks of a group."""

    task: str
    document: int


@dataclass(frozen=True)
class Chunk:
    """A fixed set of samples. It depends on the task and the chunk size alone, never on who runs it."""

    number: int
    samples: tuple[SampleKey, ...]
    requests: tuple[Instance, ...]


def make_chunks(lm: StepsaverLM, task: LoadedTask, options: EvaluationOptions, size: int) -> list[Chunk]:
    """Returns the samples of a task in the harness's order, `size` in a chunk, and in the last what is left over."""
    by_sample: dict[SampleKey, list[Instance]] = {}
    for name, requests in build_requests(lm, task, options).items():
        for request in requests:
            by_sample.setdefault(SampleKey(name, request.doc_id), []).append(request)
    keys = list(by_sample)
    chunks = []
    for number, members in enumerate(divided(keys, size)):
        chunks.append(Chunk(number, members, tuple(request for key in members for request in by_sample[key])))
    return chunks


def divided(items: Sequence[Item], size: int) -> list[tuple[Item, ...]]:
    """Returns groups of `size` items, the last of up to twice as many: none is smaller, unless it is the only one."""
    groups = max(1, len(items) // size)
    return [tuple(items[size * index : None if index == groups - 1 else size * (index + 1)]) for index in range(groups)]


def data_hash(chunks: Sequence[Chunk]) -> str:
    """Returns the hash of everything that a task asks, and of the documents that its answers are compared with."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for request in chunk.requests:
            content = [request.task_name, request.doc_id, request.arguments, request.doc]
            digest.update(json.dumps(content, sort_keys=True, default=lambda each: type(each).__name__).encode())
    return digest.hexdigest()[:16]


def _backend(spec: ExperimentSpec, session: "Session") -> Backend:
    """What runs the operations, also where a dry run has the outline of a model alone."""
    of = session.model.dtype, session.device
    return fused_backend(spec.compile, session.model.config, *of) or backend_for(*of)


@dataclass(frozen=True)
class TaskRun:
    """What identifies a cell besides its config: task, limit and everything that changes numbers."""

    experiment: Experiment
    session: Session
    task: LoadedTask
    limit: int | None
    chunks: tuple[Chunk, ...]
    data: str  # hash
    runners: dict[str, ConfigRunner] = field(default_factory=dict)  # by config; each is made once

    @property
    def folder_name(self) -> str:
        return task_folder(self.task.name, self.limit)

    def runner(self, config: ConfigSpec) -> ConfigRunner:
        if config.name not in self.runners:
            self.runners[config.name] = ConfigRunner(self.session, self.experiment, config, self.task)
        return self.runners[config.name]

    def identity(self, config: ConfigSpec) -> Identity:
        spec, session, engine = self.experiment.spec, self.session, self.runner(config).engine
        decoder = engine.decoder
        return Identity(
            plugins=plugin_hashes([*decoder.rules, *filter(None, [decoder.policy])]),
            model=session.model_hash,
            layers=session.model.config.layers,
            source=source_hash(),
            libraries=library_versions(),
            kernels=_backend(spec, session).has_kernels,
            weights=session.weights,
            decode=decoder.text,
            rules=[registry.describe(rule) for rule in decoder.rules],
            policy=registry.describe(decoder.policy) if decoder.policy else None,
            decoding=DecodingIdentity(**asdict(engine.decoding)),
            task=self.task.name,
            metric=self.task.accuracy,
            num_fewshot=self.task.num_fewshot,
            data=self.data,
            limit=self.limit,
            seed=spec.seed,
            estimator=self.runner(config).settings.estimator,
            max_new_tokens=spec.decoding.max_new_tokens,
            token_limit=spec.max_new_tokens,
            dtype=str(session.model.dtype),
            device=str(session.device),
            batch_size=session.batch_size,
            chunk_samples=spec.chunk_of(session.batch_size),
        )


def prepare_task(experiment: Experiment, session: Session, task: LoadedTask, limit: int | None) -> TaskRun:
    """Divides the requests that the harness makes for a task into chunks; nothing is run."""
    runner = ConfigRunner(session, experiment, experiment.config(experiment.spec.baseline), task)
    size = experiment.spec.chunk_of(session.batch_size)
    chunks = tuple(make_chunks(runner.lm(), task, EvaluationOptions(limit=limit), size))
    return checked_task_run(experiment, session, task, limit, chunks, runner)


def checked_task_run(
    experiment: Experiment,
    session: Session,
    task: LoadedTask,
    limit: int | None,
    chunks: tuple[Chunk, ...],
    baseline: ConfigRunner | None = None,
) -> TaskRun:
    """Refuses requests that the model has no room for, before a stored result is opened or set aside."""
    baseline = baseline or ConfigRunner(session, experiment, experiment.config(experiment.spec.baseline), task)
    baseline.lm().check_requests([request for chunk in chunks for request in chunk.requests])
    runners = {baseline.config.name: baseline}
    return TaskRun(experiment, session, task, limit, chunks, data_hash(chunks), runners)
