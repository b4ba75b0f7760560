"""Decodes of the tiny model as trace documents."""

from collections.abc import Sequence

from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.report.trace_data import Run, Text, TraceDocument, TraceRecorder, trace_document

BLOCK = 8
PROMPTS = [(5, 6, 7), tuple(range(3, 3 + BLOCK)), tuple(range(20, 20 + 2 * BLOCK + 3))]


def engine_of(
    model: Transformer,
    *rules: str,
    stop_ids: tuple[int, ...] = (),
    batch_size: int = 2,
    decoder: Decoder | None = None,
) -> Engine:
    return Engine(
        model,
        decoder=decoder or Denoise(Threshold(0.5), tuple(map(parse_rule, rules))),
        batch_size=batch_size,
        decoding=resolve_decoding(model.config, sub_block_size=4, stop_ids=stop_ids),
    )


def traced(engine: Engine, max_new_tokens: int = 24) -> tuple[list[Completion], list[Run]]:
    recorder = TraceRecorder(engine)
    finished = engine.generate(PROMPTS, max_new_tokens=max_new_tokens, on_step=recorder)
    completions = sorted(finished, key=lambda each: each.index)
    return completions, recorder.runs(PROMPTS, completions)


def document_of(engines: Sequence[Engine], text: Text = str, max_new_tokens: int = 24) -> TraceDocument:
    runs = [traced(engine, max_new_tokens)[1] for engine in engines]
    return trace_document("tiny", PROMPTS, engines, runs, text)
