"""The files of a new experiment."""

EXPERIMENT = """\
question: Does my rule save time without losing answers?
tasks: [mini_gsm8k]
configs:
  - name: baseline
  - name: my_rule
    rules: ["previous_row:refresh=block", "trim:level=changed"]
baseline: baseline
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1.05", drop_points: "> 20"}
"""

PROPOSAL = """\
# Proposal: {name}

**Status**: planned

## Hypothesis

## Background

## Method

| Variable | Values |
|---|---|
| Independent | |
| Dependent | accuracy, throughput |
| Controlled | |

## Success criteria

See `experiment.yaml`.

## Limitations
"""

TASKS = """\
# Tasks: {name}

- [ ] `stepsaver run {name} --limit 10`
- [ ] `stepsaver run {name}`
- [ ] Read the verdict, write the analysis in results.md
"""

RESULTS = """\
# Results: {name}

<!-- tables -->
<!-- /tables -->

## Analysis
"""

FILES = {"experiment.yaml": EXPERIMENT, "proposal.md": PROPOSAL, "tasks.md": TASKS, "results.md": RESULTS}
