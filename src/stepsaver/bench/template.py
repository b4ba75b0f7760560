"""The files of a new experiment, after the source's templates."""

import getpass
import json
import subprocess
import time
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stepsaver.bench.experiment import ConfigSpec, ExperimentSpec

EXAMPLE = {
    "question": "Does my rule save time without losing answers?",
    "tasks": "[mini_gsm8k]",
    "configs": """\
- name: baseline
- {name: autoregressive, decode: autoregressive}  # a reference: shown beside the others, never judged
- name: my_rule
  rules: ["window:refresh=block", "trim:level=changed"]  # from left to right (`stepsaver list rules`)""",
    "baseline": "baseline",
    "success": """\
confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
reject_if: {speed_up: "< 1.05", drop_points: "> 20"}""",
}


def experiment_text() -> str:
    """Returns an experiment's file: an example, and every other field commented out, with what it is for."""
    lines = ["# What each key says stands behind it; those that are commented out have the value that is shown."]
    for name, field in ExperimentSpec.model_fields.items():
        if name in EXAMPLE:
            value = EXAMPLE[name]
            lines += [f"{name}:  # {field.description}" if "\n" in value else f"{name}: {value}  # {field.description}"]
            lines += [f"  {line}" for line in value.split("\n") if "\n" in value]
            if name == "configs":
                lines += [
                    f"    # {line}" for line in _commented(ConfigSpec) if not line.startswith(("name:", "rules:"))
                ]
        elif isinstance(field.default, BaseModel):
            lines += [f"# {name}:  # {field.description}"]
            lines += [f"#   {line}" for line in _commented(type(field.default))]
        else:
            lines.append(f"# {_line(name, field)}")
    return "\n".join(lines) + "\n"


def _commented(model: type[BaseModel], without: Sequence[str] = ()) -> list[str]:
    return [_line(name, field) for name, field in model.model_fields.items() if name not in without]


def _line(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    value = "" if default is None or default is PydanticUndefined else f" {json.dumps(default)}"
    return f"{name}:{value}  # {field.description}"


PROPOSAL = """\
# Proposal: {name} - TITLE

**Status**: planned
**Created**: {created}
**Author**: {author}

## Hypothesis

What should hold, and why.

## Background

What is known, and what it rests on.

## Method

### Approach

### Variables

- **Independent**:
- **Dependent**: accuracy (task-specific), throughput (tokens/s)
- **Controlled**: model, batch size, caches, threshold

### Setup

| Component | Details |
|---|---|
| Model | embedded |
| Benchmarks | mini_gsm8k |
| Compute | |
| Dtype | auto |

### Experiment matrix

| Config | Rules | Policy |
|---|---|---|
| baseline | none | threshold 0.9 |
| my_rule | window:refresh=block, trim:level=changed | threshold 0.9 |
| autoregressive | none: one forward per token, a reference | |

## Evaluation

### Metrics

| Metric | Description |
|---|---|
| Accuracy | the declared metric of each task (`stepsaver list tasks`) |
| Throughput | tokens per second, paired with the baseline chunk by chunk |

### Baseline

`baseline`: no reuse.

### Success criteria

As in `experiment.yaml`, which decides the verdict:

- **Confirm if**: speed-up > 1.2 with a drop < 5 points
- **Reject if**: speed-up < 1.05, or a drop > 20 points

## Limitations
"""

TASKS = """\
# Tasks: {name}

## Phase 0: Planning
- [ ] Write the proposal: hypothesis, matrix, criteria
- [ ] `stepsaver run {name} --dry-run`

## Phase 1: Validation
- [ ] `stepsaver run {name} --limit 10`
- [ ] `stepsaver report {name} --limit 10 --check` finds nothing invalid

## Phase 2: Full runs
- [ ] `stepsaver run {name}`
- [ ] `stepsaver report {name} --check` finds nothing invalid

## Phase 3: Analysis
- [ ] Read `stepsaver report {name}`, write summary and conclusion in results.md
- [ ] `stepsaver report {name} --save-artifacts`, commit the artifacts

## Known issues
"""

RESULTS = """\
# Results: {name}

**Status**: not run
**Date**:
**Proposal**: [proposal.md](proposal.md)

## Summary

## Results

<!-- tables -->
<!-- /tables -->

## Analysis

### Key findings

### Unexpected observations

## Conclusion

## Next steps

## Artifacts

| Artifact | Location |
|---|---|
| Summaries | `artifacts/` |
| Full results | `results/` (not committed) |
| Logs of jobs | `logs/` (not committed) |
"""

FILES = {"experiment.yaml": experiment_text(), "proposal.md": PROPOSAL, "tasks.md": TASKS, "results.md": RESULTS}


def filled_files(name: str) -> dict[str, str]:
    """Returns the files by name, with the experiment's name, the date and the author filled in."""
    values = {"{name}": name, "{created}": time.strftime("%Y-%m-%d"), "{author}": _author()}
    found = dict(FILES)
    for pattern, value in values.items():
        found = {file: text.replace(pattern, value) for file, text in found.items()}
    return found


def _author() -> str:
    """Returns the user's name in git, else the name of the account."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() or getpass.getuser()
    except (OSError, subprocess.SubprocessError):
        return getpass.getuser()
