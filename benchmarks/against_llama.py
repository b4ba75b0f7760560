"""Times forwards of a few rows in llama.cpp and here, in turns, with the same shape, threads and context."""

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from benchmarks.gguf import write_random
from stepsaver.engine.curve import Scratch
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer

ROWS = (1, 8, 32)
CONTEXT = 64  # rows that come before them
TOKEN = 5  # any
NAME = "llama.cpp"
MODULE = "llama_cpp"


def load_module() -> ModuleType:
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(f"--against {NAME}: llama-cpp-python cannot be used here ({error})") from None


class LlamaCpp:
    """A model in llama.cpp, called through the C functions that its Python package exposes, without its own loop."""

    def __init__(self, library: Any, path: Path, *, threads: int, rows: int) -> None:
        self.library = library
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT + rows, CONTEXT + rows, CONTEXT + rows
        settings.n_threads = settings.n_threads_batch = threads
        self.context = library.llama_init_from_model(self.model, settings) if self.model else None
        if not self.context:
            raise UsageError(f"--against {NAME}: it does not load the model that was written for it")
        self.memory = library.llama_get_memory(self.context)
        self._decode(0, CONTEXT)

    def seconds(self, rows: int) -> float:
        """Returns the seconds of one forward after the context, including the logits of all rows."""
        taken = self._decode(CONTEXT, rows)
        self.library.llama_memory_seq_rm(self.memory, 0, CONTEXT, -1)
        return taken

    def _decode(self, first: int, rows: int) -> float:
        batch = self.library.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for row in range(rows):
            batch.token[row], batch.pos[row] = TOKEN, first + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
        started = perf_counter()
        failed = self.library.llama_decode(self.context, batch)
        self.library.llama_synchronize(self.context)
        taken = perf_counter() - started
        self.library.llama_batch_free(batch)
        assert not failed, f"llama_decode says {failed}"
        return taken

    def close(self) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)


def measure_against_llama(model: Transformer, repeats: int, rows: Sequence[int] = ROWS) -> list[dict[str, Any]]:
    """Returns, by number of rows, the milliseconds of a forward there and here, and the ratio of the medians. Both have
    float16 weights if ours are.
    """
    library = load_module()
    silent = _silence(library)
    dtype = torch.float16 if model.kept.float16 else torch.float32
    scratch = Scratch(model, resolve_decoding(model.config, stop_ids=()), slots=1, context=CONTEXT, positions=max(rows))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_random(model.config, path, dtype)
        theirs = LlamaCpp(library, path, threads=torch.get_num_threads(), rows=max(rows))
        table = [_compare(theirs, scratch, count, repeats) for count in rows]
        theirs.close()
    del silent
    return table


def _compare(theirs: LlamaCpp, scratch: Scratch, rows: int, repeats: int) -> dict[str, Any]:
    here: list[float] = []
    there: list[float] = []
    for _ in range(repeats + 1):  # the first ones warm up
        there.append(theirs.seconds(rows))
        here.append(scratch.seconds(rows, CONTEXT))
    ours, other = 1000 * median(here[1:]), 1000 * median(there[1:])
    return {"rows": rows, "ours_ms": ours, "llama_cpp_ms": other, "ratio": ours / other, "repeats": repeats}


def _silence(library: Any) -> object:
    """Silences the log of llama.cpp. The callback that is returned has to be kept as long as the library is used."""
    if not hasattr(library, "llama_log_callback"):
        return None
    callback = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(callback, ctypes.c_void_p(0))
    return callback
