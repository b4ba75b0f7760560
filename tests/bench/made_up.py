"""What a run stores, made up: every field has a value, and a test changes those that it is about."""

from typing import Any

from stepsaver.bench.documents import Identity, Provenance, Summary, Timing

IDENTITY: dict[str, Any] = {
    "plugins": {},
    "model": "abc",
    "source": "def",
    "libraries": {"torch": "2"},
    "kernels": True,
    "weights": "auto",
    "rules": ["layer_reuse:k=2"],
    "decode": "block",
    "policy": "threshold:threshold=0.9",
    "decoding": {
        "block_size": 32,
        "sub_block_size": 8,
        "mask_id": 1,
        "prefix_cache": True,
        "block_cache": True,
        "stop_ids": [1, 2],
        "bos_id": None,
        "predicts": "next",
        "join": "off",
    },
    "layers": 28,
    "task": "made_up",
    "metric": "exact_match,none",
    "num_fewshot": 0,
    "data": "ghi",
    "limit": None,
    "seed": 0,
    "estimator": "trajectory",
    "max_new_tokens": 256,
    "token_limit": None,
    "dtype": "torch.float32",
    "device": "cpu",
    "batch_size": 32,
    "chunk_samples": 8,
}
SUMMARY: dict[str, Any] = {
    "task": "made_up",
    "config": "config",
    "timestamp": "2026-01-20T10:00:00Z",
    "accuracy": 0.9,
    "accuracy_metric": "exact_match,none",
    "accuracy_interval": [0.88, 0.92],
    "samples": 100,
    "beside": {},
    "groups": {},
    "baseline": "baseline",
    "is_baseline": False,
    "is_reference": False,
    "is_control": False,
    "unlike_baseline": ["rules"],
    "different_answers": 4,
    "paired": {"drop_points": [1.0, 0.0, 2.0], "test": "score", "lost": 3, "won": 1, "mcnemar_p": 0.5},
    "speed_up": {"tokens_per_s": [1.5, 1.4, 1.6], "seconds_per_sample": [1.5, 1.4, 1.6]},
    "over_reference": None,
    "pairs": 40,
    "rate": [100.0, 98.0, 102.0],
    "timed_again": [],
    "chunks": 4,
    "chunks_not_comparable": 0,
    "sessions": 1,
    "batch_invariance": {"samples": 0, "different": 0},
    "confirmation_p": 0.5,
    "predicted": 1.5,
    "predicted_by": "operations",
    "throughput": {
        "tokens": 10_000,
        "requests": 100,
        "decode_seconds": 100.0,
        "tokens_per_s": 100.0,
        "requests_per_s": 1.0,
        "loading_seconds": 1.0,
        "warm_up_seconds": 0.5,
    },
    "cost": {
        "forwards": 1000,
        "denoising_steps": 900,
        "flops": 1e9,
        "row_layers": 10_700,
        "row_layers_reused": 300,
        "by_kind": {},
    },
    "tokens_before_stop": 9_900,
    "sample_forwards": 1000,
    "planning_seconds": 1.0,
    "peak_memory_bytes": 2**28,
    "gpu_info": None,
    "git": {"commit": "0" * 40, "dirty": False},
    "environment": {"python": "3.11", "machine": "x86_64", "torch": "2"},
    "machine": {"host": "here"},
    "model_args": {"model": "model", "revision": None, "dtype": "torch.float32"},
    "eval_params": {
        "limit": None,
        "batch_size": 32,
        "seed": 0,
        "rules": ["layer_reuse:k=2"],
        "policy": "threshold:threshold=0.9",
    },
    "run_id": "run",
    "identity": IDENTITY,
    "equal_to": None,
    "spot_check": None,
    "other_cores": None,
    "disturbed_chunks": [],
    "inert_rules": [],
}
TIMING: dict[str, Any] = {
    "comparable": True,
    "when": 0.0,
    "samples": 8,
    "requests": 8,
    "tokens": 100,
    "seconds": 1.0,
    "warm_up_seconds": 0.0,
    "forwards": 10,
    "denoising_steps": 10,
    "flops": 1e9,
    "row_layers": 100,
    "row_layers_reused": 0,
    "by_kind": {},
    "predicted_seconds": None,
    "prefill_seconds": 0.0,
    "sample_forwards": 10,
    "planning_seconds": 0.1,
    "other_cores": None,
    "threads": 1,
    "peak_memory_bytes": 0,
    "loading_seconds": 0.0,
    "gpu": None,
}


PROVENANCE = Provenance(git={}, environment={}, machine={}, given={})


def identity(**changes: Any) -> Identity:
    return Identity.model_validate(IDENTITY | changes)


def summary(**changes: Any) -> Summary:
    return Summary.model_validate(SUMMARY | changes)


def timing(chunk: int, *, session: str = "s", **changes: Any) -> Timing:
    return Timing.model_validate({"chunk": chunk, "session": session} | TIMING | changes)


def kinds(**steps: int) -> dict[str, dict[str, float]]:
    """Kinds of steps that cost nothing, by how many there are of each."""
    return {
        kind: {"steps": count, "row_layers": 0, "row_layers_reused": 0, "flops": 0.0} for kind, count in steps.items()
    }
