"""The model and the tasks that ship with the package: a checkpoint, lm-eval tasks, their test files."""

from pathlib import Path

FOLDER = Path(__file__).parent
DATA_FOLDER = FOLDER / "data"
MODEL_FOLDER = FOLDER / "model"
TASKS_FOLDER = FOLDER / "tasks"
