"""A task of an experiment in a session: its chunks, and what identifies a run of each config on it."""

from dataclasses import asdict, dataclass

from stepsaver.bench.experiment.configs import ConfigSpec
from stepsaver.bench.experiment.spec import Experiment
from stepsaver.bench.experiment.task_folders import task_folder
from stepsaver.bench.results.identity import library_versions, plugin_hashes, source_hash
from stepsaver.bench.results.run_document import DecodingIdentity, Identity
from stepsaver.bench.running.chunks import Chunk, data_hash, make_chunks
from stepsaver.bench.running.config_runner import ConfigRunner
from stepsaver.bench.running.session import Session
from stepsaver.engine import kernels, registry
from stepsaver.evaluation.evaluate import EvaluationOptions
from stepsaver.evaluation.task_loading import LoadedTask


@dataclass(frozen=True)
class TaskRun:
    """What identifies a cell besides its config: task, limit and everything that changes numbers."""

    experiment: Experiment
    session: Session
    task: LoadedTask
    limit: int | None
    chunks: tuple[Chunk, ...]
    data: str  # hash

    @property
    def folder_name(self) -> str:
        return task_folder(self.task.name, self.limit)

    def identity(self, config: ConfigSpec) -> Identity:
        spec, session = self.experiment.spec, self.session
        engine = session.engine(self.experiment, config)
        plugins = plugin_hashes([*engine.rules, engine.policy])
        return Identity(
            **({"plugins": plugins} if plugins else {}),
            model=session.model_hash,
            layers=session.model.config.layers,
            source=source_hash(),
            libraries=library_versions(),
            kernels=kernels.serve(session.model.dtype, session.device),
            weights=session.weights,
            rules=[registry.describe(rule) for rule in engine.rules],
            policy=registry.describe(engine.policy),
            decoding=DecodingIdentity(**asdict(engine.decoding)),
            task=self.task.name,
            metric=self.task.accuracy,
            num_fewshot=self.task.num_fewshot,
            data=self.data,
            limit=self.limit,
            seed=spec.seed,
            estimator=spec.estimator,
            max_new_tokens=spec.decoding.max_new_tokens,
            token_limit=spec.max_new_tokens,
            dtype=str(session.model.dtype),
            device=str(session.device),
            batch_size=session.batch_size,
            chunk_samples=spec.chunk_samples,
        )


def prepare_task(experiment: Experiment, session: Session, task: LoadedTask, limit: int | None) -> TaskRun:
    """Divides the requests that the harness makes for a task into chunks; nothing is run."""
    baseline = experiment.config(experiment.spec.baseline)
    lm = ConfigRunner(session, experiment, baseline, task.path).lm
    chunks = tuple(make_chunks(lm, task, EvaluationOptions(limit=limit), experiment.spec.chunk_samples))
    return checked_task_run(experiment, session, task, limit, chunks)


def checked_task_run(
    experiment: Experiment, session: Session, task: LoadedTask, limit: int | None, chunks: tuple[Chunk, ...]
) -> TaskRun:
    """Refuses requests that the model has no room for, before a stored result is opened or set aside."""
    lm = ConfigRunner(session, experiment, experiment.config(experiment.spec.baseline), task.path).lm
    lm.check_requests([request for chunk in chunks for request in chunk.requests])
    return TaskRun(experiment, session, task, limit, chunks, data_hash(chunks))
