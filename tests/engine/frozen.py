"""Texts, forwards, scores and refusals as they were before the engine was rewritten, in float64 (frozen.json.gz).

A case says what is decoded, in today's words. `built` turns it into an engine: it is all that knows how engines are
made, and what changes when names do.
"""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from stepsaver.engine.decoders.chosen import chosen_decoder
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.positions import describe
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.embedded import MODEL_FOLDER
from tests.conftest import GOLDEN, sharpened, tiny_config

FROZEN = Path(__file__).parent.parent / "frozen.json.gz"
Case = dict[str, Any]

NEW_REFUSALS = {  # what a refusal said, or a part of it, and what it says now
    "rule previous_row": "rule window",
    "rule near_rows": "rule suffix_dropout",
    "rows and": "positions and",
    "rule light_commit": "rule partial_commit",
    "rows that predict": "positions that predict",
    "policy verified needs": "speculative decoding needs",
    "verified drafts with context=block have no": "speculative decoding with context=block has no",
}
# Drafts had other options; what they write is what it was, their forwards are not.
DRAFTS = {"ahead=never": "positions=0", "ahead=auto": "positions=auto", "ahead=always": "positions=20", "span=auto": ""}
NO_LONGER_REFUSED = "needs rows that predict the token after them"  # drafts, and the autoregressive estimator
PROMPTS_OF = {"next": "tiny", "self": "tiny"}
PARTS = ("attention_run", "keys_values_run", "mlp_run", "head_rows", "recomputed_context")


@cache
def model_named(name: str) -> Transformer:
    """`next` and `self` are random, by what a position predicts; the others are checkpoints."""
    if name == "next":
        return sharpened(random_model(tiny_config(), dtype=torch.float64, seed=5))
    if name == "self":
        own = {"architecture": "SDARForCausalLM", "predicts": "self", "head_norms": True, "qkv_bias": False}
        return sharpened(random_model(tiny_config(**own), dtype=torch.float64, seed=3))
    return load_model({"golden": GOLDEN, "embedded": MODEL_FOLDER}[name], dtype=torch.float64)


def built(case: Case, batch_size: int) -> Engine:
    model = model_named(case["model"])
    text = _decoder_of_today(case.get("decode", "block"))
    decoding = resolve_decoding(
        model.config,
        sub_block_size=case.get("sub_block_size"),
        stop_ids=tuple(case["stop_ids"]) if "stop_ids" in case else None,
        prefix_cache=case.get("prefix_cache", True),
        block_cache=case.get("block_cache", True),
        join=case.get("join", "auto"),  # type: ignore[arg-type]
    )
    options = {"policy": case.get("policy"), "rules": case.get("rules", ())}
    if text == "autoregressive":  # as it was decoded then: in blocks of one, whatever the policy
        options = {}
    decoder = chosen_decoder(text, **options)
    return Engine(model, decoder=decoder, batch_size=batch_size, decoding=decoding)


def _decoder_of_today(text: str) -> str:
    name, separator, options = text.partition(":")
    return name + separator + ",".join(filter(None, (DRAFTS.get(each, each) for each in options.split(","))))


def observed(case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    """What the file holds of a case."""
    try:
        if "estimator" in case:
            return {"scores": list(_scores(case, prompts))}
        return _decoded(case, prompts)
    except UsageError as error:
        return {"refused": str(error)}


def _decoded(case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    """Each sample's ids; and alone and in a batch its steps, positions summed over layers, and the forwards."""
    texts, runs = [], []
    for batch_size in (1, 3):
        trace, sampling = Trace(), Sampling(**case.get("sampling", {}))
        engine = built(case, batch_size)
        completions = engine.generate(prompts, max_new_tokens=case["limit"], sampling=sampling, trace=trace)
        done = sorted(completions, key=lambda each: each.index)
        texts.append([" ".join(map(str, each.ids)) for each in done])
        work = [sum(getattr(entry, part) for entry in trace.entries) for part in PARTS]
        runs.append(([_steps(each.steps) for each in done], work, trace.forwards))
    assert texts[0] == texts[1], "a text depends on its batch"
    steps, work, forwards = map(list, zip(*runs, strict=True))
    same = slice(0, 1 if steps[0] == steps[1] else 2)
    return {"ids": texts[0], "steps": steps[same], "work": work[same], "forwards": forwards}


def _steps(steps: list) -> str:
    """`full 0-7 +2, sub 4-7 +1 x2`: the kind, the positions of the block that run, how many become tokens."""
    texts = [f"{each.kind} {describe(each.window)} +{each.unmasked}" for each in steps]
    counted = [(text, len(list(group))) for text, group in groupby(texts)]
    return ", ".join(text + (f" x{count}" if count > 1 else "") for text, count in counted)


def _scores(case: Case, prompts: list[list[int]]) -> Iterator[list]:
    requests = [ScoreRequest(tuple(ids[:cut]), tuple(ids[cut:])) for ids in prompts for cut in case["cuts"]]
    for batch_size in (1, 3):
        scores = built(case, batch_size).score(requests, estimator=case["estimator"], score_stop=case["score_stop"])
        for each in sorted(scores, key=lambda score: score.index):
            yield [each.loglikelihood, each.is_greedy, each.steps]


def assert_frozen(stored: dict[str, Any]) -> None:
    case = stored["case"]
    found = observed(case, PROMPTS[PROMPTS_OF.get(case["model"], case["model"])])
    if NO_LONGER_REFUSED in stored.get("refused", ""):
        return
    drafts = case.get("decode", "").startswith("speculative")
    for name, expected in stored.items():
        if drafts and name in ("steps", "work", "forwards"):
            continue
        if name == "scores":
            own = slice(0, 2 if case.get("decode") == "autoregressive" else 3)  # it takes no denoising steps now
            known = [[pytest.approx(score, abs=1e-8), *others][own] for score, *others in expected]
            assert [each[own] for each in found[name]] == known, case
        elif name == "refused":
            assert found.get(name) == _said_today(expected), case
        elif name != "case":
            assert found.get(name) == expected, f"{name} of {case}"


def _said_today(refusal: str) -> str:
    for old, new in NEW_REFUSALS.items():
        refusal = refusal.replace(old, new)
    return refusal


_CONTENT = json.loads(gzip.decompress(FROZEN.read_bytes()))
PROMPTS: dict[str, list[list[int]]] = _CONTENT["prompts"]
CASES: list[dict[str, Any]] = _CONTENT["cases"]
