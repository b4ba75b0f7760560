"""The frames of a trace say what the engine did."""

import json

import pytest

from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.plan import commit_plan
from stepsaver.engine.positions import positions_between
from stepsaver.report.trace_data import Frame, Proposal, Run, _denoising_frame, _Seen, first_difference
from tests.report.traces import BLOCK, PROMPTS, document_of, engine_of, traced

RULES = [
    (),
    ("window:refresh=block", "trim:level=changed"),
    ("layer_reuse:k=3,layers=last,mode=output",),
    ("layer_reuse:k=2,layers=all,mode=mlp",),
    ("adaptive_layers:probe=1,threshold=0.5",),
    ("window:refresh=block", "suffix_dropout"),
    ("trim:level=changed", "partial_commit:settle=0"),
]


def rows_of(text: str) -> list[int]:
    ranges = [] if text == "none" else [list(map(int, each.split("-"))) for each in text.split(",")]
    return [row for each in ranges for row in range(each[0], each[-1] + 1)]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules) or "none")
def test_frames_replay_the_text_and_add_up(tiny_model: Transformer, rules: tuple[str, ...]) -> None:
    completions, runs = traced(engine_of(tiny_model, *rules))
    for prompt, completion, run in zip(PROMPTS, completions, runs, strict=True):
        assert [frame["kind"] for frame in run["frames"]] == [step.kind for step in completion.steps]
        text = dict(enumerate(completion.ids, len(prompt)))
        for frame in run["frames"]:
            unmasked = rows_of(frame["unmasked"])
            proposed = {row: token for row, token, _ in frame["proposals"]}
            assert all(text.get(frame["start"] + row, proposed[row]) == proposed[row] for row in unmasked)
            assert set(unmasked) <= set(rows_of(frame["sub_block"]))
        known = [position for frame in run["frames"] for position in frame["positions"]]
        assert sorted(known) == sorted(text)
        totals = run["frames"][-1]["totals"]
        assert totals["tokens"] == len(completion.ids)
        assert totals["forwards"] == sum(step.rows > 0 for step in completion.steps)
        assert totals["mlp_run"] == sum(step.mlp_run for step in completion.steps)
        assert totals["attention_reused"] == sum(step.attention_reused for step in completion.steps)


def test_blocks_of_one_row_are_committed_without_a_step(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    engine.decoding = resolve_decoding(tiny_model.config, block_size=1, stop_ids=())
    completions, runs = traced(engine, max_new_tokens=5)
    for prompt, completion, run in zip(PROMPTS, completions, runs, strict=True):
        text = [*prompt, *completion.ids]
        commits = [frame for frame in run["frames"] if frame["kind"] == "commit"]
        assert [(frame["start"], frame["tokens"]) for frame in commits] == [
            (start, [text[start]]) for start in range(len(prompt), len(text) - 1)
        ]
        assert run["frames"][-1]["totals"]["tokens"] == 5


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules) or "none")
def test_layers_of_a_frame_count_the_row_layers_that_ran(tiny_model: Transformer, rules: tuple[str, ...]) -> None:
    completions, runs = traced(engine_of(tiny_model, *rules))
    for completion, run in zip(completions, runs, strict=True):
        for step, frame in zip(completion.steps, run["frames"], strict=True):
            if step.kind == "prefill":
                assert frame["layers"] == []
                continue
            shares = [(last - first, carried, mlp) for first, last, carried, _, _, mlp in frame["layers"]]
            assert sum(layers * len(rows_of(mlp)) for layers, _, mlp in shares) == step.mlp_run
            carried = sum(layers * len(rows_of(rows)) for layers, rows, _ in shares)
            assert carried == step.mlp_run + step.mlp_reused


def test_suffix_dropout_are_those_after_the_sub_block_and_no_layer_has_them(tiny_model: Transformer) -> None:
    hidden = set()
    for run in traced(engine_of(tiny_model, "suffix_dropout"))[1]:
        for frame in run["frames"]:
            rows = rows_of(frame["hidden"])
            hidden.add(frame["hidden"])
            if frame["kind"] not in ("full", "sub"):
                assert rows == []
                continue
            assert rows == list(range(max(rows_of(frame["sub_block"])) + 1, BLOCK))
            for layers in frame["layers"]:
                assert not any(set(rows) & set(rows_of(each)) for each in layers[2:])
            assert not set(rows) & {row for row, _, _ in frame["proposals"]}
    assert hidden == {"none", "4-7"}
    for run in traced(engine_of(tiny_model, "trim"))[1]:
        assert {frame["hidden"] for frame in run["frames"]} == {"none"}


def test_a_partial_commit_shows_the_rows_that_it_keeps(tiny_model: Transformer) -> None:
    completions, runs = traced(engine_of(tiny_model, "partial_commit:settle=0"))
    kept = 0
    for completion, run in zip(completions, runs, strict=True):
        for step, frame in zip(completion.steps, run["frames"], strict=True):
            if step.kind != "commit":
                continue
            for first, last, carried, _, keys_values, _ in frame["layers"]:
                assert len(rows_of(keys_values)) == step.rows
                assert len(rows_of(carried)) == (step.head_rows if last == tiny_model.config.layers else step.rows)
                kept += (last - first) * (BLOCK - step.rows)
    assert kept


def test_changed_rows_are_those_revealed_before(tiny_model: Transformer) -> None:
    run = traced(engine_of(tiny_model))[1][0]
    before: Frame | None = None
    for frame in run["frames"]:
        if frame["kind"] == "commit":
            before = None
            continue
        assert frame["changed"] == (before["unmasked"] if before else "none")
        before = frame


def test_tokens_behind_the_stop_token_belong_to_no_text(tiny_model: Transformer) -> None:
    free = traced(engine_of(tiny_model))[0][0].ids
    stop = free[len(free) // 2]
    completions, runs = traced(engine_of(tiny_model, stop_ids=(stop,)))
    assert completions[0].finish == "stop"
    assert runs[0]["frames"][-1]["totals"]["tokens"] == len(completions[0].ids) <= len(free) // 2 + 1


def test_a_document_is_json_and_has_a_text_for_every_token(tiny_model: Transformer) -> None:
    document = document_of([engine_of(tiny_model), engine_of(tiny_model, "trim")])
    assert document["engines"] == ["no reuse", "trim:level=changed,budget=4,settle=1,age=4"]
    assert [run["saved"] > 0 for run in document["samples"][2]["runs"]] == [False, True]
    drafted = document_of([engine_of(tiny_model, decoder=parse_decoder("speculative:span=4"))])
    assert drafted["engines"][0].startswith("speculative:positions=auto,span=4")
    read = json.loads(json.dumps(document, allow_nan=False))
    for sample in read["samples"]:
        for run in sample["runs"]:
            shown = [token for frame in run["frames"] for token in frame["tokens"] if token != read["mask_id"]]
            assert {str(token) for token in (*shown, *run["ids"], *sample["prompt"])} <= set(read["texts"])
    assert len(read["samples"]) == len(PROMPTS)


def test_nothing_decoded_is_no_frame(tiny_model: Transformer) -> None:
    assert all(not run["frames"] for run in traced(engine_of(tiny_model), max_new_tokens=0)[1])


def run_of(ids: list[int], *positions: list[int]) -> Run:
    frames: list[Frame] = [{"positions": each} for each in positions]  # type: ignore[typeddict-item]
    return Run(ids=ids, finish="length", frames=frames)


def test_the_first_difference_is_the_first_in_time() -> None:
    one = run_of([7, 8, 9], [2], [4], [3])
    assert first_difference((1, 1), [one, one]) is None
    assert first_difference((1, 1), [one]) is None
    other = run_of([7, 5, 6], [2], [3], [4])  # both later tokens differ; here position 3 is known first
    assert first_difference((1, 1), [one, other]) == {"position": 3, "frame": 1}
    longer = run_of([7, 8, 9, 4], [2], [4], [3], [5])
    assert first_difference((1, 1), [one, longer]) == {"position": 5, "frame": 3}


def test_a_prefill_that_predicts_gives_the_first_token(tiny_model: Transformer) -> None:
    run = traced(engine_of(tiny_model))[1][1]  # its prompt is exactly one block
    assert [frame["kind"] for frame in run["frames"][:2]] == ["prefill", "full"]
    assert run["frames"][0]["positions"] == [BLOCK]


@pytest.mark.parametrize(
    ("written", "unmasked", "accepted", "rejected"),
    [
        ([11, 12, 13, 14], 4, "1-3", "none"),  # all of the draft, and a token more
        ([11, 12, 99, 98], 3, "1-2", "3"),  # two, and its own token instead of the third
        ([99, 12, 13, 14], 1, "none", "1-3"),  # what agrees after the first that does not is thrown away
    ],
)
def test_a_verification_says_which_drafted_rows_it_kept(
    tiny_model: Transformer, written: list[int], unmasked: int, accepted: str, rejected: str
) -> None:
    layers = tiny_model.config.layers
    plan = commit_plan(4, layers=layers)
    proposals = [Proposal(row, token, 0.5) for row, token in enumerate(written, 1)]
    seen = _Seen(plan, 16, [10, 11, 12, 13, 0], 0b11110, 0, proposals, positions_between(1, unmasked + 1), [])
    step = traced(engine_of(tiny_model))[0][0].steps[-1]._replace(kind="verify")
    frame = _denoising_frame(step, seen)
    assert (frame["accepted"], frame["rejected"]) == (accepted, rejected)
    assert frame["positions"] == list(range(17, 17 + unmasked))
    other = _denoising_frame(step._replace(kind="full"), seen)
    assert (other["accepted"], other["rejected"]) == ("none", "none")


@pytest.mark.parametrize("fields", ["positions=0,span=4", "positions=20", "positions=9,context=block"])
def test_frames_of_drafts_replay_the_text(tiny_model: Transformer, fields: str) -> None:
    completions, runs = traced(engine_of(tiny_model, decoder=parse_decoder(f"speculative:{fields}")))
    kept = thrown = 0
    for prompt, completion, run in zip(PROMPTS, completions, runs, strict=True):
        assert [frame["kind"] for frame in run["frames"]] == [step.kind for step in completion.steps]
        words = dict(enumerate(completion.ids, len(prompt)))
        assert sorted(position for frame in run["frames"] for position in frame["positions"]) == sorted(words)
        for frame in (each for each in run["frames"] if each["kind"] == "verify"):
            written = {row: token for row, token, _ in frame["proposals"]}
            accepted, rejected, unmasked = (rows_of(frame[name]) for name in ("accepted", "rejected", "unmasked"))  # type: ignore[literal-required]
            first = next(row for row in range(len(frame["tokens"])) if row in rows_of(frame["sub_block"]))
            assert unmasked == list(range(first, first + len(accepted) + 1))[: len(unmasked)]
            assert all(frame["tokens"][row] == written[row] for row in accepted)
            assert all(words.get(frame["start"] + row, written[row]) == written[row] for row in unmasked)
            assert not rejected or rejected[0] == first + len(accepted)
            taken = [each for each in frame["branches"] if each["is_taken"]]
            assert [each["accepted"] for each in taken] == [len(accepted)][: len(taken)]
            kept, thrown = kept + len(accepted), thrown + len(rejected)
    assert kept
    assert thrown
