"""All that a command may import, so that no case pays for it: the server that cases are forked from imports this."""

import gc
import importlib
import os
import pkgutil
import shutil

os.environ["TQDM_DISABLE"] = "1"  # as the commands set it before they import tqdm

import datasets
import lm_eval.evaluator
import matplotlib.backends.backend_agg
import matplotlib.pyplot
import plotly.graph_objects
import pyarrow.parquet
import rich.progress
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import stepsaver
import tests.fuzz.command_process

LIBRARIES = (
    datasets, lm_eval.evaluator, matplotlib.backends.backend_agg, matplotlib.pyplot, plotly.graph_objects,
    pyarrow.parquet, rich.progress, AutoTokenizer, PreTrainedTokenizerFast, tests.fuzz.command_process,
)  # fmt: skip
LEFT_OUT = ("__main__", "._kernels", "sandboxed", "embedded.tasks", "runners.slurm")
for module in pkgutil.walk_packages(stepsaver.__path__, "stepsaver."):
    if not any(part in module.name for part in LEFT_OUT):
        importlib.import_module(module.name)
_which = shutil.which
shutil.which = lambda name, *rest, **named: None if name == "squeue" else _which(name, *rest, **named)  # no cluster
gc.collect()
gc.freeze()  # a collection in a fork would copy every page
