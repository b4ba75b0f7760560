"""`stepsaver generate`: prompts in, texts or token ids out."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.commands._model_options import (
    ModelChoice,
    add_model_arguments,
    build_engine,
    choose_model,
    describe_engine,
)
from stepsaver.commands._progress import progress
from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.engine.engine import Completion, Engine, Prompt
    from stepsaver.engine.trace import Trace
    from stepsaver.evaluation.tokenizer import Tokenizer

HELP = "decode prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="P", help="one prompt")
    source.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL: {"prompt": "..."}, or {"ids": [...]}')
    parser.add_argument("--ids", action="store_true", help="prompts and output are token ids; no tokenizer is needed")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=True, help="use the chat template if there is one"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="exact limit (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.engine.sampling import NonFiniteLogits, Sampling
    from stepsaver.engine.trace import Trace

    sampling = Sampling(options.temperature, options.top_p, options.seed)
    choice = choose_model(options)
    tokenizer = None if options.ids else _tokenizer(choice)
    prompts = list(_read_prompts(options, choice, tokenizer))
    engine = build_engine(options, choice)
    trace = Trace()
    completions: list[Completion] = []
    try:
        finished = engine.generate(prompts, max_new_tokens=options.max_new_tokens, sampling=sampling, trace=trace)
        for completion in progress(finished, total=len(prompts), label="decoding"):
            completions.append(completion)
    except NonFiniteLogits as error:
        raise UsageError(f"{options.model}: {error}") from None
    completions.sort(key=lambda each: each.index)
    if options.json:
        print(json.dumps(_document(options, engine, completions, trace, tokenizer)))
    else:
        _print_texts(completions, trace, tokenizer)
    return 0


def _tokenizer(choice: ModelChoice) -> "Tokenizer":
    from stepsaver.evaluation.tokenizer import Tokenizer

    return Tokenizer(choice.folder)


def _read_prompts(
    options: argparse.Namespace, choice: ModelChoice, tokenizer: "Tokenizer | None"
) -> "Iterator[Prompt]":
    """The prompts as ids, checked against the model before its weights are read."""
    from stepsaver.engine.engine import Prompt, check_prompt

    for line, entry in _entries(options):
        place = f"{options.prompts} line {line}" if options.prompts else "--prompt"
        if tokenizer is None:
            ids = entry.get("ids")
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise UsageError(f'{place}: expected {{"ids": [whole numbers]}}')
        else:
            text = entry.get("prompt")
            if not isinstance(text, str):
                raise UsageError(f'{place}: expected {{"prompt": "text"}}')
            ids = tokenizer.encode_prompt(text, chat=options.chat)
        identity = entry.get("id")
        prompt = Prompt(tuple(ids), None if identity is None else str(identity))
        check_prompt(prompt, choice.config, choice.decoding, options.max_new_tokens, place)
        yield prompt


def _entries(options: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    if options.prompt is not None:
        if options.ids:
            try:
                yield 1, {"ids": [int(token) for token in options.prompt.replace(",", " ").split()]}
            except ValueError:
                raise UsageError(f"--prompt {options.prompt!r} is not a list of token ids") from None
        else:
            yield 1, {"prompt": options.prompt}
        return
    try:
        text = options.prompts.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {options.prompts}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{options.prompts} line {number} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise UsageError(f"{options.prompts} line {number} is not an object")
        yield number, entry


def _document(
    options: argparse.Namespace,
    engine: "Engine",
    completions: "list[Completion]",
    trace: "Trace",
    tokenizer: "Tokenizer | None",
) -> dict[str, Any]:
    from stepsaver.engine.cost import as_json, cost_by_kind, trace_cost

    config = engine.model.config
    cost = trace_cost(config, trace, engine.model.dtype.itemsize)
    return {
        "samples": [_sample(completion, tokenizer) for completion in completions],
        "cost": as_json(cost) | {"by_kind": cost_by_kind(config, trace)},
        "throughput": throughput(trace),
        "engine": describe_engine(engine, options.model),
    }


def throughput(trace: "Trace") -> dict[str, Any]:
    seconds = trace.decode_seconds
    return {
        "tokens_generated": trace.tokens_generated,
        "decode_seconds": seconds,
        "prefill_seconds": trace.prefill_seconds,
        "tokens_per_s": trace.tokens_generated / seconds if seconds else 0.0,
        "counts": "forwards and choices, prefill included; no loading, warm-up, tokenization; tokens to the stop",
    }


def _sample(completion: "Completion", tokenizer: "Tokenizer | None") -> dict[str, Any]:
    sample: dict[str, Any] = {
        "ids": completion.ids,
        "finish": completion.finish,
        "forwards": [{"kind": s.kind, "rows": s.rows, "first_row": s.first_row} for s in completion.steps],
    }
    if tokenizer is not None:
        sample["text"] = tokenizer.decode(completion.ids)
    return sample


def _print_texts(completions: "list[Completion]", trace: "Trace", tokenizer: "Tokenizer | None") -> None:
    for completion in completions:
        text = " ".join(map(str, completion.ids)) if tokenizer is None else tokenizer.decode(completion.ids)
        print(text)
    figures = throughput(trace)
    print(
        f"{figures['tokens_generated']} tokens in {figures['decode_seconds']:.2f} s"
        f" ({figures['tokens_per_s']:.1f} tokens/s, {trace.forwards} forwards, loading not counted)",
        file=sys.stderr,
    )
