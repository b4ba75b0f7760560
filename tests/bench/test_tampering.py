"""Altered results: whatever is done to a stored line or file, the audit says so and the next run does not use it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepsaver.bench import audit as audit_module
from stepsaver.bench.audit import CHECKS
from stepsaver.cli import main
from tests.bench.conftest import PAIR as CONFIGS
from tests.bench.conftest import PAIR_LIMIT as LIMIT
from tests.bench.running import run
from tests.bench.tampering import edit_raw_lines
from tests.bench.test_run import PLANTED


@pytest.fixture
def finished(finished_pair: Path) -> Path:
    return finished_pair


@pytest.fixture
def experiment(finished_pair: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(finished_pair, tmp_path / "experiment")
    return tmp_path / "experiment"


def cell(folder: Path, config: str = "trimmed") -> Path:
    return folder / "results" / f"mini_ifeval_limit_{LIMIT}" / config


def samples(folder: Path, config: str = "trimmed") -> Path:
    return cell(folder, config) / "samples.jsonl"


def stored(folder: Path, config: str) -> list[tuple]:
    lines = map(json.loads, samples(folder, config).read_text().splitlines())
    return sorted((line["chunk"], line["document"], line["ids"], line["text"]) for line in lines if "ids" in line)


def change_line(line: bytes, **fields: object) -> bytes:
    """As an editor or a script would: the checksum stays what it was."""
    content = json.loads(line)
    return json.dumps(content | {k: v for k, v in fields.items() if k in content}).encode() + b"\n"


def every_text(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [change_line(line, text="#### 0") for line in lines])


def one_token(folder: Path) -> None:
    def change(lines: list[bytes]) -> list[bytes]:
        ids = json.loads(lines[1])["ids"]
        return [lines[0], change_line(lines[1], ids=[*ids[:-1], ids[-1] + 1]), *lines[2:]]

    edit_raw_lines(samples(folder), change)


def one_removed(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [*lines[:1], *lines[2:]])


def last_chunk_removed(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: lines[:-3])


def first_chunk_removed(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: lines[3:])


def one_doubled(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [lines[0], *lines])


def chunks_doubled(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [*lines, *lines[3:]])


def one_inserted(folder: Path) -> None:
    foreign = samples(folder, "baseline").read_bytes().splitlines(keepends=True)[4]
    edit_raw_lines(samples(folder), lambda lines: [*lines[:4], foreign, *lines[4:]])


def chunks_of_another_run(folder: Path) -> None:
    """They hold among themselves."""
    others = samples(folder, "baseline").read_bytes().splitlines(keepends=True)[4:]
    edit_raw_lines(samples(folder), lambda lines: [*lines[:3], *others])


def two_swapped(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [lines[1], lines[0], *lines[2:]])


def chunks_swapped(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: lines[3:] + lines[:3])


def one_space(folder: Path) -> None:
    edit_raw_lines(samples(folder), lambda lines: [lines[0].replace(b'", "', b'",  "', 1), *lines[1:]])


def nonsense(folder: Path) -> None:
    for name in ("samples.jsonl", "trace.jsonl"):
        inserted = [b'{"chunk": [1], "session": {}, "chunk_end": []}\n', b"[" * 100_000 + b"\n", b"7\n", b"\xff\x00\n"]
        edit_raw_lines(cell(folder) / name, lambda lines, inserted=inserted: [*lines[:2], *inserted, *lines[2:]])


def timing_changed(folder: Path) -> None:
    change = lambda lines: [change_line(lines[0], seconds=0.001), *lines[1:]]  # noqa: E731
    edit_raw_lines(cell(folder) / "trace.jsonl", change)


def timing_removed(folder: Path) -> None:
    edit_raw_lines(cell(folder) / "trace.jsonl", lambda lines: lines[1:])


def samples_of_another_run(folder: Path) -> None:
    for name in ("samples.jsonl", "trace.jsonl"):
        shutil.copy(cell(folder, "baseline") / name, cell(folder) / name)


def first_line_removed(folder: Path) -> None:
    samples(folder).write_bytes(samples(folder).read_bytes().split(b"\n", 1)[1])


def first_line_of_another_run(folder: Path) -> None:
    path = samples(folder)
    path.write_bytes(path.read_bytes().replace(b'"run": "', b'"run": "0', 1))


def checksums_removed(folder: Path) -> None:
    for path in (samples(folder), cell(folder) / "trace.jsonl"):
        path.write_bytes(re.sub(rb', "sum": "[0-9a-f]{16}"', b"", path.read_bytes()).split(b"\n", 1)[1])


def identity_missing(folder: Path) -> None:
    (cell(folder) / "run.json").unlink()


def identity_changed(folder: Path) -> None:
    path = cell(folder) / "run.json"
    path.write_text(path.read_text().replace("threshold=0.9", "threshold=0.2"))


def accuracy_changed(folder: Path) -> None:
    path = cell(folder) / "summary.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"accuracy": 1.0}))


ALTERED = [
    every_text, one_token, one_removed, last_chunk_removed, first_chunk_removed, one_doubled, chunks_doubled,
    one_inserted, chunks_of_another_run, two_swapped, chunks_swapped, one_space, nonsense, timing_changed,
    timing_removed, samples_of_another_run, first_line_removed, first_line_of_another_run, checksums_removed,
    identity_missing, identity_changed, accuracy_changed,
]  # fmt: skip


def found_by_audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["report", str(folder), "--check", "--limit", str(LIMIT), "--json"])
    found = [finding for task in json.loads(capsys.readouterr().out).values() for finding in task["findings"]]
    return code, [each["message"] for each in found if each["check"] == "integrity" and each["level"] == "invalid"]


@pytest.mark.parametrize("alter", ALTERED, ids=lambda alter: alter.__name__)
def test_what_was_altered_is_found_said_and_run_again(
    experiment: Path, finished: Path, alter: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert found_by_audit(experiment, capsys)[1] == []
    before = {path.read_bytes() for path in (experiment / "results").rglob("*.jsonl")}
    alter(experiment)
    altered = {path.read_bytes() for path in (experiment / "results").rglob("*.jsonl")}
    code, messages = found_by_audit(experiment, capsys)
    assert code == 1
    assert len(messages) == 1
    assert messages[0].startswith("trimmed")
    run(experiment, LIMIT)
    assert ("was missing" if alter is identity_missing else "set aside") in capsys.readouterr().err
    assert found_by_audit(experiment, capsys)[1] == []
    for config in CONFIGS:
        assert stored(experiment, config) == stored(finished, config)
    kept = [path.read_bytes() for path in (experiment / "results").rglob("*.jsonl*")]
    for content in altered - before:
        assert any(each.startswith(content) for each in kept), "nothing is deleted"


def test_a_run_never_adopts_samples_of_another_one(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `run.json` gone, nothing but the files themselves says that they are of threshold 0.9."""
    for config in CONFIGS:
        (cell(experiment, config) / "run.json").unlink()
    path = experiment / "experiment.yaml"
    policy = 'decoding: {sub_block_size: 4, policy: "threshold:threshold=0.2"}'
    path.write_text(path.read_text().replace("decoding: {sub_block_size: 4}", policy))
    older = [samples(experiment, config).read_bytes() for config in CONFIGS]
    run(experiment, LIMIT)
    assert capsys.readouterr().err.count("nothing of it is used") == 2 * len(CONFIGS)
    for config, content in zip(CONFIGS, older, strict=True):
        assert [each.read_bytes() for each in cell(experiment, config).glob("samples.jsonl.other-run-*")] == [content]
        assert samples(experiment, config).read_bytes().splitlines()[1:] != content.splitlines()[1:]
        summary = json.loads((cell(experiment, config) / "summary.json").read_text())
        assert summary["identity"]["policy"] == "threshold:threshold=0.2,at_most=none,strict=true"


def test_every_check_has_a_fault_that_it_finds() -> None:
    remarks_only = {"equal", "texts", "shards", "prediction"}  # planted in test_what_is_odd_is_said
    refused_before = {"layers"}  # the experiment's file is refused as a whole
    planted = {check for _, check in PLANTED} | {"integrity"}
    assert planted | remarks_only | refused_before == CHECKS.keys()
    table = re.findall(r"^\| (\w+) \| ", audit_module.__doc__ or "", re.MULTILINE)
    assert table == ["check", *CHECKS], "the module says what each of them finds"
