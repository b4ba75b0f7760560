"""Rule sets against no reuse on the embedded word problems: paired, interleaved, in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from stepsaver.bench.timings import predicted_seconds
from stepsaver.engine.curve import Curve, measure_curve
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.defaults import DEFAULT_POLICY
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import DENOISING, Trace
from stepsaver.evaluation.tokenizer import TextTokenizer
from training.problems import word_problems

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Config:
    """Rules and a policy as text."""

    rules: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY

    def engine(self, model: Transformer, batch_size: int, curve: Curve) -> Engine:
        rules, policy = tuple(map(parse_rule, self.rules)), parse_policy(self.policy)
        return Engine(model, decoder=Denoise(policy, rules), batch_size=batch_size, curve=curve)


@dataclass
class Tally:
    """What one configuration did, chunk by chunk."""

    engine: Engine
    traces: list[Trace] = field(default_factory=list)
    answers: dict[int, str] = field(default_factory=dict)

    def whole_trace(self) -> Trace:
        whole = Trace()
        for trace in self.traces:
            whole.records += trace.records
            whole.tokens_generated += trace.tokens_generated
        return whole


def compare_configs(
    model: Transformer,
    folder: Path,
    documents: Sequence[dict[str, Any]],
    configs: Mapping[str, Config],
    *,
    batch_size: int,
) -> list[dict[str, Any]]:
    """A row per configuration. The first one is the baseline; their order rotates from chunk to chunk."""
    tokenizer = TextTokenizer(folder)
    prompts = [
        tokenizer.encode(tokenizer.chat_prompt([{"role": "user", "content": document["question"]}]))
        for document in documents
    ]
    curve = measure_curve(model, batch_size=batch_size)
    tallies = {name: Tally(config.engine(model, batch_size, curve)) for name, config in configs.items()}
    names = list(tallies)
    for name in names:  # warm-up, not counted
        _decode(tallies[name], prompts[:1], 0, Trace())
    for turn, start in enumerate(range(0, len(prompts), batch_size)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            trace = Trace()
            found = _decode(tallies[name], prompts[start : start + batch_size], start, trace)
            tallies[name].answers.update({index: tokenizer.decode(ids) for index, ids in found.items()})
            tallies[name].traces.append(trace)
    baseline = tallies[names[0]]
    return [_row(name, tally, baseline, documents, curve) for name, tally in tallies.items()]


def predicted_rate(curve: Curve, tally: Tally) -> float:
    trace = tally.whole_trace()
    return trace.tokens_generated / predicted_seconds(curve, tally.engine.model.config, trace.records)


def _decode(tally: Tally, prompts: Sequence[list[int]], start: int, trace: Trace) -> dict[int, list[int]]:
    completions = tally.engine.generate(prompts, max_new_tokens=MAX_NEW_TOKENS, trace=trace)
    return {start + completion.index: completion.ids for completion in completions}


def _row(name: str, tally: Tally, baseline: Tally, documents: Sequence[dict[str, Any]], curve: Curve) -> dict[str, Any]:
    ratios = [_rate(ours) / _rate(theirs) for ours, theirs in zip(tally.traces, baseline.traces, strict=True)]
    whole = tally.whole_trace()
    steps = sum(entry.kind in DENOISING for entry in whole.entries)
    return {
        "config": name,
        "problems": len(documents),
        "right": sum(
            word_problems.is_right(document, tally.answers[index]) for index, document in enumerate(documents)
        ),
        "tokens_per_s": median(map(_rate, tally.traces)),
        "speed_up": median(ratios),
        "speed_up_per_sample": median(
            theirs.decode_seconds / ours.decode_seconds
            for ours, theirs in zip(tally.traces, baseline.traces, strict=True)
        ),
        "predicted_speed_up": predicted_rate(curve, tally) / predicted_rate(curve, baseline),
        "tokens_per_step": whole.tokens_generated / steps,
        "first_answer": tally.answers[0],
    }


def _rate(trace: Trace) -> float:
    return trace.tokens_generated / trace.decode_seconds
