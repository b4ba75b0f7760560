# Everything runs in a virtual environment of its own. `make setup` is part of every other target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the CPU build of torch here; other machines install the package with their own torch
TORCH := torch==2.13.0
WORKERS ?= 2

.PHONY: setup demo test test-all test-cards test-slurm sanitize lint clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/stepsaver/engine/backends/cpu/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) --constraint constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $(READY)

demo: setup
	$(BIN)/stepsaver demo

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m "not long and not slurm"

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m "not slurm"
	$(BIN)/python tools/sanitize.py --all --workers $(WORKERS)

# a fixed share of the engine's tests with kernels under ASan and UBSan; skips with a message without them
sanitize: setup
	$(BIN)/python tools/sanitize.py --workers $(WORKERS)

# what a graphics card would be asked, and the code that it would run, without one: kernels compiled for three cards
test-cards: lint
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/cards triton==3.9.0
	PYTHONPATH=$(VENV)/cards OMP_NUM_THREADS=1 $(BIN)/pytest tests/engine/test_card_code.py tests/engine/test_null_device.py $(CARDS)

# needs root and the packages slurm-wlm and munge; skips with a message without them
test-slurm: setup
	$(BIN)/pytest -rs -m slurm tests/slurm

clean:
	rm -rf $(VENV) src/stepsaver/engine/backends/cpu/*.so build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
