"""Where a run was begun: what is recorded of it, and nothing else of the environment."""

import json
from pathlib import Path

import pytest
import torch

from stepsaver.bench.identity import job_id, machine_facts
from stepsaver.engine.machine import device_name
from stepsaver.evaluation.model_source import hub_revision


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "4711"}, "4711"),
        ({"SLURM_JOB_ID": "4712", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}, "4711_3"),
    ],
)
def test_the_job(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_id() == expected


def test_a_secret_of_the_environment_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_test")
    assert "hf_secret" not in json.dumps(machine_facts(torch.device("cpu")))


def test_a_gpu_is_named_with_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By stand-ins: no machine of ours has one."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$4" = "--id=1" ] || [ "$3" = "--id=1" ] && echo 550.54\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro RTX 6000")
    memory = type("Properties", (), {"total_memory": 24 * 2**30})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    found = machine_facts(torch.device("cuda:1"))
    assert (found["device"], found["memory_bytes"], found["driver"]) == ("Quadro RTX 6000", 24 * 2**30, "550.54")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine_facts(torch.device("cuda:1"))["driver"] is None


def test_a_processor_has_a_name() -> None:
    assert device_name(torch.device("cpu"))


def test_the_revision_is_that_of_the_hubs_cache() -> None:
    assert hub_revision(Path("/hub/models--a--b/snapshots/0123abc")) == "0123abc"
    assert hub_revision(Path("/models/snapshot")) is None
