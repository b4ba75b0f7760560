"""Experiments and their stored results, in forms and states that they should not have."""

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from stepsaver.bench.checksums import SUM, seal_document
from stepsaver.bench.experiment import ConfigSpec, ExperimentSpec
from stepsaver.engine.defaults import JOINS
from tests.fuzz.damage import as_json, spoiled, values
from tests.fuzz.files import damaged, documents
from tests.fuzz.words import registry_texts
from tests.fuzz.workspace import CELLS, RUN, Case, affordable

SUCCESS = {
    "confirm_if": {"speed_up": "> 1.2", "drop_points": "< 5"},
    "reject_if": {"speed_up": "< 1.05", "drop_points": "> 20"},
}
# What a config may say for itself, with values that may stand there.
CONFIG_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **{name: registry_texts() for name in ConfigSpec.model_fields},
    "rules": st.lists(registry_texts(), max_size=2),
    "baseline": st.sampled_from(["baseline", "other", "x"]),
    "success": spoiled(SUCCESS) | st.just(SUCCESS),
    "join": st.sampled_from(JOINS),
    "threshold": st.floats() | st.integers(),
    "prefix_cache": st.booleans(),
    "block_cache": st.booleans(),
}


@st.composite
def experiment_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """An `experiment.yaml` that is not as it should be."""
    name = "experiments/tiny/experiment.yaml"
    content = (workspace / name).read_bytes()
    kind = draw(st.integers(0, 5))
    if kind == 0:
        new: Any = draw(damaged(content))
    elif kind == 1:
        new = content + b"\nmodel: model\n" if draw(st.booleans()) else b"&a [*a]\n" + content
    else:
        tree = yaml.safe_load(content)
        if kind == 2:
            axes = {f"k{n}": list(range(draw(st.integers(0, 10)))) for n in range(draw(st.integers(0, 10)))}
            pattern = draw(st.sampled_from(["{k0}", "{0}", "{k0[0]}", "{k0.x}", "n{k0}{k1}", "{", "{k0!r:>999999999}"]))
            tree["configs"] = {"grid": axes, "name": pattern, "rules": [draw(st.sampled_from(["trim", pattern]))]}
        elif kind == 3:
            config = draw(st.sampled_from(tree["configs"]))
            name = draw(st.sampled_from(sorted(CONFIG_FIELDS)))
            config[name] = draw(CONFIG_FIELDS[name] | values)
        if kind != 3 or draw(st.booleans()):
            tree = draw(spoiled(tree, tuple(ExperimentSpec.model_fields)))
        new = draw(st.sampled_from([as_json, _as_yaml]))(tree)
    command = draw(
        st.sampled_from(
            [["status"], ["report", "tiny", "--limit", "2", "--check"], [*RUN, "--dry-run"], ["report"], RUN]
        )
    )
    return Case(affordable(list(command)), {name: new})


def _as_yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree, allow_unicode=False).encode("utf-8", "backslashreplace")


@st.composite
def _resealed(draw: st.DrawFn, content: bytes) -> bytes:
    """As of another version: a checksum that holds, of a document that has not what is expected."""
    document = draw(spoiled(json.loads(content)))
    if isinstance(document, dict):
        document = seal_document({name: value for name, value in document.items() if name != SUM})
    return as_json(document)


@st.composite
def stored_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """Results, jobs or the lock in a state that no run leaves them in."""
    cell = CELLS / draw(st.sampled_from(["baseline", "other"]))
    names = [cell / name for name in ("summary.json", "run.json", "samples.jsonl", "trace.jsonl")]
    names += [Path("experiments/tiny/logs/jobs.jsonl"), CELLS.parent / ".lock", cell, CELLS]
    names += [Path("experiments/tiny/results.md"), CELLS / "curve.json", CELLS / "curve.json"]
    path = draw(st.sampled_from(names))
    content = (workspace / path).read_bytes() if (workspace / path).is_file() else b"x"
    new: Any
    if path.suffix == ".json":
        new = draw(documents(content) | _resealed(content))
    elif path.suffix == ".jsonl" and draw(st.booleans()):
        lines = content.splitlines()
        index = draw(st.integers(0, len(lines) - 1))
        lines[index] = draw(spoiled(json.loads(lines[index])).map(as_json) | _resealed(lines[index]))
        new = b"\n".join(lines) + b"\n"
    else:
        new = draw(damaged(content))
    commands = [
        ["status"], ["report", "tiny", "--limit", "2", "--check"], ["report", "tiny", "--limit", "2", "--json"],
        ["report", "tiny", "--limit", "2"], ["report"], [*RUN, "--dry-run"], RUN,
        ["report", "tiny", "--limit", "2", "--save-artifacts", "--csv", "x.csv"],
        [*RUN, "--force", "--why", "so"],
    ]  # fmt: skip
    return Case(list(draw(st.sampled_from(commands))), {str(path): new})
