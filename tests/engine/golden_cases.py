"""The reference decoder's cases, from the tests' own copy or from the shared folder."""

import json
from pathlib import Path
from typing import Any

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold

BEYOND_THE_REFERENCE = 128  # enough to cover the reference, which rounds its limit to blocks


def read_golden(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "golden.json").read_text())
    return content


def decode_case(model: Transformer, case: dict[str, Any], *, batch_size: int = 4) -> list[Completion]:
    decoding = resolve_decoding(
        model.config,
        sub_block_size=case["small_block_size"],
        stop_ids=(case["stop_token"],),
        block_cache=case["block_cache"],
    )
    engine = Engine(model, decoder=Denoise(Threshold(case["threshold"])), batch_size=batch_size, decoding=decoding)
    completions = engine.generate(case["prompts"], max_new_tokens=BEYOND_THE_REFERENCE)
    return sorted(completions, key=lambda each: each.index)


def expected_ids(case: dict[str, Any]) -> list[list[int]]:
    """The reference's generated ids of each sample decoded alone, up to its stop token."""
    outputs = case.get("outputs_alone", case["outputs"])
    generated = [output[len(prompt) :] for prompt, output in zip(case["prompts"], outputs, strict=True)]
    stop = case["stop_token"]
    return [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in generated]


def assert_equal_to_reference(case: dict[str, Any], completions: list[Completion]) -> None:
    assert len(completions) == len(case["prompts"])
    for completion, expected in zip(completions, expected_ids(case), strict=True):
        shorter = min(len(completion.ids), len(expected))
        assert shorter > 0
        assert completion.ids[:shorter] == expected[:shorter]
        if expected[-1] == case["stop_token"]:
            assert completion.ids == expected
            assert completion.finish == "stop"
    if len(case["prompts"]) == 1 and expected_ids(case)[0][-1] != case["stop_token"]:
        ours = [[step.kind, step.rows, step.first_position] for step in completions[0].steps]
        assert ours[: len(case["trace"])] == [forward[:3] for forward in case["trace"]]
