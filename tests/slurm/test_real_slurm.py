"""Shards on a real SLURM of one node: one job is pre-empted, one is killed, and nothing is lost or done twice.

`make test-slurm` runs this. It needs root and the packages slurm-wlm and munge.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.test_architecture import ROOT

pytestmark = pytest.mark.slurm
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel")
LIMIT, CHUNK, SHARDS, CONFIGS = 64, 4, 2, 9  # enough chunks that a signal arrives in their midst


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach the cluster."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here: apt-get install --no-install-recommends slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("the daemons of the test cluster need root")
    base = tmp_path_factory.mktemp("slurm")
    for folder in (base, *base.parents[:2]):
        folder.chmod(0o755)
    script = str(Path(__file__).parent / "cluster.sh")
    subprocess.run([script, "up", str(base)], check=True, timeout=90)
    yield os.environ | {"SLURM_CONF": str(base / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    subprocess.run([script, "down", str(base)], check=True, timeout=90)


def copy_of_baseline(folder: Path) -> Path:
    """`00_baseline` on one task, in chunks so small that a job has several of them."""
    folder.mkdir()
    text = (ROOT / "experiments" / "00_baseline" / "experiment.yaml").read_text()
    text = re.sub(r"^tasks:.*$", f"tasks: [mini_gsm8k]\nchunk_samples: {CHUNK}", text, flags=re.MULTILINE)
    (folder / "experiment.yaml").write_text(text)
    return folder


def stepsaver(cluster: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepsaver", *map(str, arguments), "--limit", str(LIMIT)]
    return subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=1800)


def submit(cluster: dict[str, str], folder: Path, shards: int) -> str:
    flags = ("--runner", "slurm", "--shards", shards, "--cpus", 1, "--memory-gb", 4, "--minutes", 60)
    done = stepsaver(cluster, "run", folder, *flags, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job"]


def wait_for(what: Callable[[], object], why: str, seconds: float = 1200) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"waited {seconds} s for {why}"
        time.sleep(0.2)


def answers(folder: Path) -> dict[tuple, list[int]]:
    """What is stored of every sample of every config; each of them once."""
    found = {}
    for path in (folder / "results" / f"mini_gsm8k_limit_{LIMIT}").glob("*/samples.jsonl"):
        for line in filter(lambda each: "ids" in each, map(json.loads, path.read_text().splitlines())):
            key = (path.parent.name, line["chunk"], line["document"])
            assert key not in found, f"{key} is stored twice"
            found[key] = line["ids"]
    return found


def test_jobs_that_are_pre_empted_or_killed_lose_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    sharded, local = copy_of_baseline(tmp_path / "sharded"), copy_of_baseline(tmp_path / "local")

    def command(*arguments: str) -> str:
        return subprocess.run(arguments, env=cluster, check=True, capture_output=True, text=True, timeout=300).stdout

    def is_queued() -> bool:
        return bool(command("squeue", "--noheader"))

    def log(job: str) -> str:
        path = sharded / "logs" / f"{job}_0_log.out"
        return path.read_text() if path.exists() else ""

    job = submit(cluster, sharded, SHARDS)
    refused = stepsaver(cluster, "run", sharded)
    assert refused.returncode == 2
    assert f"scancel {job}" in refused.stderr
    signals = {0: "USR2", 1: "KILL"}  # what SLURM sends ahead of a time-out or a pre-emption; a crash

    def signal_in_its_midst() -> bool:
        """Each shard as soon as it has stored a chunk of every config."""
        for shard in [each for each in signals if "k3_last: 1 of" in log(f"{job}_{each}")]:
            command("scancel", f"--signal={signals.pop(shard)}", f"{job}_{shard}")
        return not signals

    wait_for(signal_in_its_midst, "a chunk of each shard")
    wait_for(lambda: "Requeued job" in log(f"{job}_0"), "the requeue")
    wait_for(lambda: "PENDING" in command("squeue", "--noheader", "--format=%T"), "the queue to have it again")
    assert "1 pending" in stepsaver(cluster, "status", sharded).stdout
    command("scontrol", "update", f"JobId={job}_0", "StartTime=now+2")  # SLURM's own delay is two minutes
    wait_for(lambda: not is_queued(), "the jobs to end")
    begun = log(f"{job}_0").split("Requeued job", 1)[1]
    assert ": 1 of" not in begun, "a requeued shard does not run a stored chunk again"
    assert f"{LIMIT // CHUNK // SHARDS} of" in begun
    assert not list(sharded.rglob("summary.json")), "the killed shard's chunks are missing"

    rest = submit(cluster, sharded, 1)
    wait_for(lambda: not is_queued(), "the rest to be run")
    assert "audit" in log(rest)
    assert len(list(sharded.rglob("summary.json"))) == CONFIGS
    assert not list(sharded.rglob("shards/*"))
    assert stepsaver(cluster, "run", local).returncode in (0, 1)
    assert len(answers(local)) == LIMIT * CONFIGS
    assert answers(sharded) == answers(local)
    assert f"{CONFIGS}/{CONFIGS}" in stepsaver(cluster, "status", sharded).stdout
