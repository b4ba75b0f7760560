"""Shards of a run: in this process, in processes of their own, and as jobs of a SLURM that is only played."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsaver.bench import session as task_run
from stepsaver.bench.folders import find_experiment
from stepsaver.bench.run import CURVE, RunRequest, Shard, make_shards, refuse_beside_others
from stepsaver.bench.store import CellFiles, open_cell_files, read_cell_files
from stepsaver.cli import main
from stepsaver.engine.errors import UsageError
from tests.bench import running
from tests.bench.made_up import PROVENANCE, identity, timing
from tests.bench.running import cell, findings, lines, run
from tests.bench.tampering import edit_lines
from tests.bench.test_store import record

LIMIT, CHUNKS = 8, 4
CONFIGS = ("baseline", "same", "trimmed")
SECRET = "hf_planted0secret"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, write_experiment: Callable[[Path], Path]) -> Path:
    """An experiment that was run by one process."""
    folder = with_few_configs(write_experiment(tmp_path_factory.mktemp("whole") / "experiment"))
    run(folder, LIMIT)
    return folder


@pytest.fixture
def fresh(tmp_path: Path, write_experiment: Callable[[Path], Path]) -> Path:
    """The same experiment without results."""
    return with_few_configs(write_experiment(tmp_path / "experiment"))


def with_few_configs(folder: Path) -> Path:
    path = folder / "experiment.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "name: output" not in line))
    return folder


def answers(folder: Path) -> dict:
    return running.answers(folder, LIMIT)


def summaries(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("results/*/*/summary.json")}


def two_shards(folder: Path, *, force: bool = False) -> list[Shard]:
    experiment = find_experiment(str(folder))
    options = RunRequest(("mini_ifeval",), experiment.configs, experiment.spec.model, limit=LIMIT, force=force)
    return make_shards(experiment, options, 2, share_machine=True)


def quiet(config: str, done: int, total: int) -> None:
    pass


class Stopped(Exception):
    pass


def stop_after(chunks: int) -> Callable[[str, int, int], None]:
    calls = []

    def progress(config: str, done: int, total: int) -> None:
        calls.append(config)
        if len(calls) == chunks:
            raise Stopped

    return progress


def test_shards_write_apart_and_the_last_one_sums_up(fresh: Path, whole: Path) -> None:
    first, last = two_shards(fresh)
    refuse_beside_others(first.results)
    assert last.run(quiet) == []
    assert len(answers(fresh)) == LIMIT // 2 * len(CONFIGS)
    assert not summaries(fresh)
    assert first.run(quiet) == [f"mini_ifeval_limit_{LIMIT}"]
    assert answers(fresh) == answers(whole)
    assert {path.name for path in fresh.rglob("samples*")} == {"samples-1of2.jsonl", "samples-2of2.jsonl"}
    found, alone = summaries(fresh), summaries(whole)
    for config in CONFIGS:
        same = ("accuracy", "samples", "run_id", "cost", "chunks", "is_control")
        assert {name: found[config][name] for name in same} == {name: alone[config][name] for name in same}
        assert (found[config]["pairs"], found[config]["chunks_not_comparable"]) == (0, CHUNKS)
        assert (alone[config]["pairs"], alone[config]["chunks_not_comparable"]) == (CHUNKS, 0)
        assert (found[config]["predicted_by"], alone[config]["predicted_by"]) == ("operations", "curve")
    trimmed = [each["cost"]["flops"] / each["throughput"]["tokens"] for each in (found["baseline"], found["trimmed"])]
    assert found["trimmed"]["predicted"] == pytest.approx(trimmed[0] / trimmed[1])
    assert [len(list(folder.rglob(CURVE))) for folder in (fresh, whole)] == [0, 1]
    assert [each.message for each in findings(fresh, LIMIT) if each.check == "shards"] == [
        "3 configs have chunks that were timed by concurrent shards on one machine; no speed-up counts them"
    ]


def test_a_stopped_shard_goes_on_where_it_stopped(fresh: Path, whole: Path) -> None:
    first, last = two_shards(fresh)
    refuse_beside_others(first.results)
    with pytest.raises(Stopped):
        first.run(stop_after(4))
    last.run(quiet)
    calls = []
    first.run(lambda config, done, total: calls.append(config))
    assert calls.count("trimmed") == CHUNKS // 2 - 1
    assert answers(fresh) == answers(whole)


def test_what_a_dead_shard_left_is_taken_over(fresh: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = two_shards(fresh)
    last.run(quiet)
    with pytest.raises(Stopped):
        first.run(stop_after(4))
    torn = cell(fresh, "baseline", LIMIT) / "samples-1of2.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"chunk": 2, "docu')  # killed in the midst of a write
    assert main(["status", str(fresh), "--limit", str(LIMIT), "--wide"]) == 0
    assert "baseline (6 samples)" in capsys.readouterr().out, "one chunk of the dead shard is missing"
    run(fresh, LIMIT)
    assert answers(fresh) == answers(whole)
    for config in CONFIGS:
        paths = sorted(cell(fresh, config, LIMIT).glob("trace*.jsonl"))
        runs = [(line["chunk"], line["session"]) for path in paths for line in lines(path)]
        assert len(runs) == len(set(runs)), "a timing is stored twice"


def test_a_share_may_be_run_by_hand(fresh: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(fresh), "--limit", str(LIMIT)]
    assert main([*command, "--shard", "2/2"]) == 0
    assert "share 2 of 2 is stored" in capsys.readouterr().out
    assert len(answers(fresh)) == LIMIT // 2 * len(CONFIGS)
    run(fresh, LIMIT, "--shard", "1/2")
    assert "Undecided" in capsys.readouterr().out
    assert answers(fresh) == answers(whole)
    assert {each["chunks_not_comparable"] for each in summaries(fresh).values()} == {0}
    for wrong in (["0/2"], ["3/2"], ["2"], ["1/2", "--force"], ["1/2", "--shards", "2"], ["1/2", "--runner", "slurm"]):
        assert main([*command, "--shard", *wrong]) == 2
        assert "--shard" in capsys.readouterr().err


def test_one_share_is_run_by_one_process(fresh: Path) -> None:
    first, last = two_shards(fresh)

    def meanwhile(config: str, done: int, total: int) -> None:
        last.run(stop_after(1))

    with pytest.raises(Stopped):
        first.run(meanwhile)
    with pytest.raises(UsageError, match="another run is writing"):
        first.run(lambda config, done, total: first.run(quiet) and None)


def test_only_one_shard_of_a_run_starts_afresh(fresh: Path, whole: Path) -> None:
    for _ in range(2):
        for shard in two_shards(fresh, force=True):
            shard.run(quiet)
    assert answers(fresh) == answers(whole)
    assert len(list(fresh.glob("results/*/previous/*"))) == len(CONFIGS)


def test_shards_of_unlike_machines_are_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = two_shards(fresh)
    first.run(quiet)
    monkeypatch.setattr(task_run, "library_versions", lambda: {"torch": "another"})
    with pytest.raises(UsageError, match="shards of one run differ in libraries"):
        last.run(quiet)


def test_a_second_run_waits_for_no_shard(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = two_shards(fresh)

    def meanwhile(config: str, done: int, total: int) -> None:
        assert main(["run", str(fresh), "--limit", str(LIMIT)]) == 2
        raise Stopped

    with pytest.raises(Stopped):
        first.run(meanwhile)
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_missing_and_repeated_samples_are_named(fresh: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole / "results", fresh / "results")
    path = fresh / "results" / f"mini_ifeval_limit_{LIMIT}" / "same" / "samples.jsonl"
    content = path.read_bytes()
    edit_lines(path, lambda lines: lines + lines[:3])
    assert main(["run", str(fresh), "--limit", str(LIMIT)]) == 2
    assert "has 2 answers twice" in capsys.readouterr().err
    path.write_bytes(content)
    edit_lines(path, lambda lines: [lines[0] | {"document": 99}, *lines[1:]])
    assert main(["run", str(fresh), "--limit", str(LIMIT)]) == 2
    assert "lacks 1 samples, such as mini_ifeval document 0" in capsys.readouterr().err


def test_every_sample_missing_everywhere_is_found(fresh: Path, whole: Path) -> None:
    shutil.copytree(whole / "results", fresh / "results")
    for path in fresh.rglob("samples.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    found = [each.message for each in findings(fresh, LIMIT) if each.level == "invalid"]
    assert "baseline has 6 samples, its summary is of 8" in found


def opened(folder: Path, part: str = "") -> CellFiles:
    return open_cell_files(folder, identity(), "run", provenance=PROVENANCE, part=part)


@settings(max_examples=15, deadline=None)
@given(owners=st.lists(st.integers(0, 3), min_size=1, max_size=8), cut=st.integers(0, 200))
def test_the_files_of_all_processes_are_read_as_one(
    tmp_path_factory: pytest.TempPathFactory, owners: list[int], cut: int
) -> None:
    """Whoever wrote which chunk, and if the last of them was killed in the midst of a write."""
    folder = tmp_path_factory.mktemp("parts") / "cell"
    for chunk, owner in enumerate(owners):
        own = opened(folder, f"{owner + 1}of4" if owner else "")
        assert sorted(own.records) == list(range(chunk)), "what others have stored is known"
        own.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk))
    whole = read_cell_files(folder, "run")
    assert [each.key.document for each in whole.all_records] == list(range(2 * len(owners)))
    assert [each.chunk for each in whole.own_timings] == list(range(len(owners)))
    assert whole.faults == []
    path = own.folder / sorted(own.sizes)[0]
    path.write_bytes(path.read_bytes()[: -1 - cut])
    again = opened(folder)
    assert len(owners) - 1 <= len(again.records) + (len(owners) if cut > 100 else 0)
    for chunk in set(range(len(owners))) - again.records.keys():
        again.append_chunk(chunk, [record(2 * chunk), record(2 * chunk + 1)], timing(chunk, session="again"))
    repaired = read_cell_files(folder, "run")
    assert (repaired.records, repaired.faults) == (whole.records, [])


def test_a_process_repairs_its_own_files_only(tmp_path: Path) -> None:
    """Another one may be in the midst of a write to its own."""
    for part in ("1of2", "2of2"):
        opened(tmp_path / "cell", part).append_chunk(int(part[0]), [record(int(part[0]))], timing(int(part[0])))
    torn = {part: tmp_path / "cell" / f"samples-{part}.jsonl" for part in ("1of2", "2of2")}
    for path in torn.values():
        path.write_bytes(path.read_bytes() + b'{"chunk": 3')
    assert sorted(opened(tmp_path / "cell", "1of2").records) == [1, 2]
    assert [path.read_bytes().endswith(b"\n") for path in torn.values()] == [True, False]
    assert sorted(opened(tmp_path / "cell").records) == [1, 2]
    assert [path.read_bytes().endswith(b"\n") for path in torn.values()] == [True, True]


def test_what_was_altered_in_a_part_is_said_kept_and_not_used(tmp_path: Path) -> None:
    cell = opened(tmp_path / "cell", "1of2")
    for chunk in (1, 2):
        cell.append_chunk(chunk, [record(chunk)], timing(chunk))
    path = cell.folder / "samples-1of2.jsonl"
    altered = path.read_bytes().replace(b"[1, 2, 1]", b"[1, 2, 9]")
    path.write_bytes(altered)
    again = opened(cell.folder)
    assert "chunk 1 is run again" in again.notes[0]
    assert [each.read_bytes() for each in cell.folder.glob("samples-1of2.jsonl.damaged-*")] == [altered]
    assert sorted(again.records) == [2]


def test_two_answers_to_one_sample_are_not_hidden_and_the_same_twice_is_no_fault(tmp_path: Path) -> None:
    for part in ("", "1of2"):
        opened(tmp_path / part / "cell").append_chunk(0, [record(0)], timing(0, session=part))
    folder = tmp_path / "cell"
    for ids, count in ((record(0).ids, 1), ((9,), 2)):
        other = opened(tmp_path / "other", "1of2")
        other.append_chunk(0, [dataclasses.replace(record(0), ids=ids)], timing(0, session="other"))
        for name in ("samples-1of2.jsonl", "trace-1of2.jsonl"):
            (other.folder / name).rename(folder / name)
        assert len(read_cell_files(folder, "run").all_records) == count


def test_parts_share_the_chunks_out() -> None:
    chunks = [SimpleNamespace(number=number) for number in range(7)]
    shards = make_shards(None, None, 3, share_machine=False)  # type: ignore[arg-type]
    parts = [[each.number for each in shard.chunks(chunks)] for shard in shards]  # type: ignore[arg-type]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]
    assert [(shard.part, shard.is_alone) for shard in shards] == [("1of3", True), ("2of3", True), ("3of3", True)]
    together = make_shards(None, None, 2, share_machine=True)  # type: ignore[arg-type]
    assert [shard.is_alone for shard in together] == [False, False]
    (alone,) = make_shards(None, None, 1, share_machine=True)  # type: ignore[arg-type]
    assert (alone.part, alone.is_alone) == ("", True)


def test_processes_of_their_own_give_the_same_samples(
    fresh: Path, whole: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    run(fresh, LIMIT, "--shards", "2")
    assert "they enter no speed-up" in capfd.readouterr().out
    assert answers(fresh) == answers(whole)
    assert len(list((fresh / "logs").glob("*.log"))) == 2
    assert_no_secret(fresh)


@pytest.mark.long
def test_shards_killed_at_any_moment_lose_nothing(fresh: Path, whole: Path) -> None:
    command = [sys.executable, "-m", "stepsaver", "run", str(fresh), "--limit", str(LIMIT), "--shards", "2"]
    generator = random.Random(1)

    def chunks_stored() -> int:
        return sum(path.read_bytes().count(b"chunk_end") for path in fresh.rglob("samples*.jsonl"))

    for _ in range(5):
        before = chunks_stored()
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        while process.poll() is None and chunks_stored() <= before:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.3)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode in (0, 1)
    assert running.invalid(fresh, LIMIT) == []
    assert answers(fresh) == answers(whole)


def assert_no_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


# A SLURM that keeps its queue in a folder and starts nothing by itself: the test is the scheduler.
FAKE_COMMANDS = {
    "sbatch": """\
cp "$1" "$QUEUE/script"
array=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
for index in $(seq 0 "${array:-0}"); do echo PENDING > "$QUEUE/7_$index"; done
echo "Submitted batch job 7"
""",
    "squeue": 'for job in "$QUEUE"/7_*; do [ -e "$job" ] && echo "7|$(cat "$job")"; done; true\n',
    "scontrol": '[ "$1" = requeue ] && echo PENDING > "$QUEUE/$2"\n',
    "scancel": 'rm -f "$QUEUE/$1"_*\n',
    "srun": """\
while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done
echo $$ > "$QUEUE/process_$SLURM_ARRAY_TASK_ID"
exec "$@"
""",
}


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    commands, folder = tmp_path / "bin", tmp_path / "queue"
    commands.mkdir()
    folder.mkdir()
    for name, text in FAKE_COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(folder))
    return folder


def start_job(queue: Path, index: int, log: Path) -> subprocess.Popen[bytes]:
    (queue / f"7_{index}").write_text("RUNNING")
    variables = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    with log.open("ab") as stream:
        return subprocess.Popen(
            ["bash", str(queue / "script")], env=os.environ | variables, stdout=stream, stderr=stream
        )


def end_job(queue: Path, index: int, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=300) == 0
    (queue / f"7_{index}").unlink()


def test_jobs_are_submitted_followed_and_requeued(
    fresh: Path,
    whole: Path,
    queue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    flags = ["--runner", "slurm", "--shards", "2", "--partition", "long", "--account", "me", "--gres", "gpu:1"]
    flags += ["--slurm", "qos=long", "--slurm", "exclusive", "--slurm", "comment=two = words"]
    with (fresh / "experiment.yaml").open("a") as stream:
        stream.write("resources: {slurm: {qos: short, mail-user: me@example.org, nice: 100}}\n")
    run = ["run", str(fresh), "--limit", str(LIMIT)]
    assert main([*run, *flags, "--minutes", "60", "--cpus", "3", "--memory-gb", "5"]) == 0
    assert "submitted job 7: 2 shards, 2 pending" in capsys.readouterr().out
    script = (queue / "script").read_text()
    asked_for = ("partition=long", "account=me", "gres=gpu:1", "time=60", "cpus-per-task=3", "mem=5GB", "array=0-1%2")
    free = ("qos=long", "exclusive", "comment='two = words'", "mail-user=me@example.org", "nice=100")
    for asked in (*asked_for, *free, "requeue"):
        assert f"#SBATCH --{asked}\n" in script, asked
    assert f"#SBATCH --output={fresh / 'logs'}" in script
    assert "--error" not in script, "what a job says and what goes wrong stand in one log"
    assert main(run) == 2
    assert "scancel 7" in capsys.readouterr().err

    log = tmp_path / "log-0"
    interrupted, other = start_job(queue, 0, log), start_job(queue, 1, tmp_path / "log-1")
    deadline = time.monotonic() + 120
    while b"chunks" not in log.read_bytes():
        assert time.monotonic() < deadline
        assert interrupted.poll() is None
        time.sleep(0.01)
    assert main(["status", str(fresh), "--limit", str(LIMIT)]) == 0
    assert "job 7: 2 shards, 2 running" in capsys.readouterr().out
    os.kill(int((queue / "process_0").read_text()), signal.SIGUSR2)
    assert interrupted.wait(timeout=60) != 0, "SLURM's signal ends the job"
    assert (queue / "7_0").read_text().strip() == "PENDING"
    end_job(queue, 1, other)
    end_job(queue, 0, start_job(queue, 0, log))
    assert "audit" in log.read_text(), "the last one audits what it has summed up"
    assert "audit" not in (tmp_path / "log-1").read_text()
    assert answers(fresh) == answers(whole)
    assert {each["chunks_not_comparable"] for each in summaries(fresh).values()} == {0}
    assert main(["status", str(fresh), "--limit", str(LIMIT)]) == 0
    assert "3/3" in (shown := capsys.readouterr().out)
    assert "job" not in shown
    assert_no_secret(fresh)


def test_what_is_wrong_with_a_submission_is_one_line(
    fresh: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", str(fresh), "--limit", str(LIMIT)]
    assert main([*run, "--partition", "long"]) == 2
    assert "--partition is for jobs" in capsys.readouterr().err
    assert main([*run, "--runner", "slrm"]) == 2
    assert "unknown runner 'slrm'; nearest: slurm" in capsys.readouterr().err
    assert main([*run, "--shards", "0"]) == 2
    assert main([*run, "--slurm", "qos=long"]) == 2
    assert "--slurm is for jobs" in capsys.readouterr().err
    for text, problem in (
        ("mem=4G", "mem is set by `memory_gb`"),
        ("array=1-9", "array is set by the number of shards"),
        ("no spaces here=1", "is no option of sbatch"),
        ("comment=a\n#SBATCH --uid=0", "is no option of sbatch"),
    ):
        assert main([*run, "--runner", "slurm", "--slurm", text]) == 2
        said = capsys.readouterr().err
        assert problem in said
        assert len(said.strip().splitlines()) == 1
    (queue.parent / "bin" / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    assert main([*run, "--runner", "slurm"]) == 2
    assert "invalid partition" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*run, "--runner", "slurm"]) == 2
    assert "no sbatch here" in capsys.readouterr().err
