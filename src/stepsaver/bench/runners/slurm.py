"""Shards as an array of SLURM jobs, through submitit.

A job that is pre-empted or runs out of time is put back into the queue and goes on where it stopped: what it has stored
is its checkpoint.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import Checkpointable

from stepsaver.bench.audit import audit, read_evidence
from stepsaver.bench.cells import Progress
from stepsaver.bench.experiment import Resources
from stepsaver.bench.folders import logs_folder
from stepsaver.bench.jobs import record_job
from stepsaver.bench.run import Shard, log_progress
from stepsaver.bench.runners.local import run_repeats
from stepsaver.engine.errors import UsageError

MOST_TIMEOUTS = 100  # each of them leaves more chunks stored


class RunShard(Checkpointable):
    """What a job does, and does again when it comes back from the queue."""

    def __call__(self, shard: Shard) -> None:
        for folder in run_repeats(shard, logs_folder(shard.experiment), log_progress):
            findings = list(map(str, audit(read_evidence(shard.experiment, shard.results, folder))))
            print(*findings or [f"audit: {folder} is complete, and nothing is wrong with it"], sep="\n", flush=True)


def launch(shards: Sequence[Shard], logs: Path, resources: Resources, progress: Progress) -> bool:
    """Puts the shards into the queue and returns False. `status` follows them; the last one writes the summaries."""
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise UsageError(f"there is no {missing[0]} here: run this where jobs are submitted, or use --runner local")
    executor = SlurmExecutor(folder=logs, max_num_timeout=MOST_TIMEOUTS)
    asked = {
        "partition": resources.partition,
        "account": resources.account,
        "gres": resources.gres,
        "cpus_per_task": resources.cpus,
        "mem": f"{resources.memory_gb}GB",
        "time": resources.minutes,
    }
    executor.update_parameters(
        job_name=f"stepsaver-{shards[0].experiment.name}",
        stderr_to_stdout=True,
        additional_parameters={"requeue": True, **resources.slurm},
        **{name: value for name, value in asked.items() if value is not None},
    )
    try:
        jobs = executor.map_array(RunShard(), shards)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UsageError(f"sbatch refused the jobs: {error}") from None
    record_job(logs, jobs[0].job_id.split("_")[0], shards)
    return False
