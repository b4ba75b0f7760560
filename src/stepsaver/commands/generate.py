"""`stepsaver generate`: prompts in, texts or token ids out."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsaver.commands._json_lines import id_list, read_json_lines, text_of
from stepsaver.commands._model_options import (
    add_model_arguments,
    build_engine,
    cost_document,
    describe_engine,
    open_chosen_model,
    throughput,
)
from stepsaver.commands._progress import progress
from stepsaver.commands._watching import (
    OnStep,
    TokenText,
    add_watching_arguments,
    check_watching,
    decode_traced,
    on_each_step,
    watch_of,
)
from stepsaver.engine.arguments import option
from stepsaver.engine.defaults import NEW_TOKENS
from stepsaver.engine.errors import UsageError, shown

if TYPE_CHECKING:
    from stepsaver.engine.decoding_settings import Prompt
    from stepsaver.engine.engine import Completion, Engine
    from stepsaver.engine.sampling import Sampling
    from stepsaver.engine.saved import SavedPositions
    from stepsaver.engine.trace import SampleStep, Trace
    from stepsaver.evaluation.open_model import OpenModel

HELP = "decode prompts"


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="P", help="one prompt")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSONL: {"prompt": "..."}, {"messages": [{"role": ..., "content": ...}]}, with --ids {"ids": [...]}',
    )
    parser.add_argument("--ids", action="store_true", help="prompts and output are token ids; no tokenizer is needed")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=True, help="use the chat template if there is one"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=option("max_new_tokens"),
        default=NEW_TOKENS,
        metavar="N",
        help="exact limit (default: %(default)s)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--temperature", type=option("temperature"), default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument("--top-p", type=option("top_p"), default=1.0, metavar="P")
    parser.add_argument("--top-k", type=option("top_k"), metavar="K")
    parser.add_argument("--seed", type=option("seed"), default=0, metavar="S")
    parser.add_argument("--n", type=option("n"), default=1, metavar="N", help="answers to each prompt, drawn apart")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_watching_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from stepsaver.engine.sampling import Sampling
    from stepsaver.engine.saved import SavedPositions
    from stepsaver.engine.trace import Trace

    sampling = Sampling(options.temperature, options.top_p, options.seed, options.top_k)
    if options.n > 1 and sampling.is_greedy:
        raise UsageError(f"--n {options.n} needs a --temperature: at 0 all answers to a prompt are the same")
    opened = open_chosen_model(options)
    against = check_watching(options, opened)
    output = Output(options, opened)
    prompts = read_prompts(options, opened)
    engine = build_engine(options, opened)
    trace, saved = Trace(), SavedPositions(engine)
    decode = partial(_decode, options, output, prompts, sampling, saved)
    if options.trace is None:
        completions = decode(engine, trace)
    else:
        completions = decode_traced(
            options, decode, engine, trace, against=against, prompts=prompts, text=output.token_text
        )
    if options.json:
        print(json.dumps(_document(options, engine, completions, trace, output)))
    else:
        _print_texts(completions, output)
        _print_figures(completions, trace, saved, engine)
    return 0


class Output:
    """How tokens are written: as text up to a stop string, or as ids."""

    def __init__(self, options: argparse.Namespace, opened: "OpenModel") -> None:
        from stepsaver.evaluation.growing_text import StopStrings

        self.opened = opened
        self.tokenizer = None if options.ids else opened.tokenizer
        self.token_text: TokenText = self.tokenizer.token_text if self.tokenizer else "{} ".format
        self.stops = None
        if options.stop:
            self.stops = StopStrings(opened.tokenizer, options.stop, block_size=opened.decoding.block_size)

    def text(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.stops.text(ids) if self.stops else self.tokenizer.decode(ids)


def _decode(
    options: argparse.Namespace,
    output: Output,
    prompts: "list[Prompt]",
    sampling: "Sampling",
    saved: "SavedPositions",
    engine: "Engine",
    trace: "Trace",
    recorder: OnStep | None = None,
) -> "list[Completion]":
    """Decodes all prompts. Returns the completions in the prompts' order."""
    watch = watch_of(options, engine, len(prompts), output.token_text)
    stops = output.stops
    finished = engine.generate(
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        trace=trace,
        on_step=on_each_step([recorder, watch, saved if saved.engine is engine else None]),
        finished=stops.are_reached if stops else None,
    )
    with output.opened.blamed(), watch or nullcontext():
        shown = finished if watch else progress(finished, total=len(prompts), label="decoding")
        return sorted((stops.cut(each) if stops else each for each in shown), key=lambda each: each.index)


def read_prompts(options: argparse.Namespace, opened: "OpenModel") -> "list[Prompt]":
    return list(_encoded_prompts(options, opened))


def _encoded_prompts(options: argparse.Namespace, opened: "OpenModel") -> "Iterator[Prompt]":
    """Yields the prompts as ids, checked against the model before its weights are read; each as often as asked for."""
    from stepsaver.engine.decoding_settings import Prompt, check_prompt
    from stepsaver.evaluation.encoding import encode_messages, encode_prompt

    for line, entry in _entries(options):
        where = f"{options.prompts} line {line}" if options.prompts else "--prompt"
        if options.ids:
            ids = id_list(entry, "ids", where)
        elif "messages" in entry:
            ids = encode_messages(opened.tokenizer, entry["messages"], where)
        else:
            ids = encode_prompt(opened.tokenizer, text_of(entry, "prompt", where), chat=options.chat)
        identity = entry.get("id")
        prompt = Prompt(ids, None if identity is None else str(identity))
        ids = check_prompt(prompt, opened.config, opened.decoding, options.max_new_tokens, where)
        for number in range(options.n):
            yield replace(prompt, ids=ids, number=number)


def _entries(options: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    if options.prompts is not None:
        yield from read_json_lines(options.prompts)
    elif options.ids:
        try:
            yield 1, {"ids": [int(token) for token in options.prompt.replace(",", " ").split()]}
        except ValueError:
            raise UsageError(f"--prompt {shown(options.prompt)} is not a list of token ids") from None
    else:
        yield 1, {"prompt": options.prompt}


def _document(
    options: argparse.Namespace,
    engine: "Engine",
    completions: "list[Completion]",
    trace: "Trace",
    output: Output,
) -> dict[str, Any]:
    return {
        "samples": [_sample(completion, output) for completion in completions],
        "cost": cost_document(engine, trace),
        "throughput": throughput(trace, tokens_generated=trace.tokens_generated),
        "engine": describe_engine(engine, options.model),
    }


def _sample(completion: "Completion", output: Output) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "ids": completion.ids,
        "finish": completion.finish,
        "forwards": [_forward(list(steps)) for _, steps in groupby(completion.steps, lambda step: step.forward)],
    }
    if output.tokenizer is not None:
        sample["text"] = output.text(completion.ids)
    return sample


def _forward(steps: "list[SampleStep]") -> dict[str, Any]:
    """What one forward ran for a sample: one step, or a context or commit and the step that shares its forward."""
    entry = {"kind": steps[0].kind, "rows": sum(step.rows for step in steps), "first_row": steps[0].first_position}
    drafted = [step.drafted for step in steps if step.kind == "verify"]
    return entry | ({"drafted": sum(drafted)} if drafted else {})


def for_terminal(text: str) -> str:
    """Returns a model's text with its control characters escaped: a terminal would obey them."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def _print_texts(completions: "list[Completion]", output: Output) -> None:
    for completion in completions:
        text = output.text(completion.ids)
        print(for_terminal(text) if sys.stdout.isatty() else text)


def _print_figures(completions: "list[Completion]", trace: "Trace", saved: "SavedPositions", engine: "Engine") -> None:
    from stepsaver.engine.saved import positions_computed

    figures = throughput(trace, tokens_generated=trace.tokens_generated)
    computed = sum(positions_computed(each.steps, engine.model.config.layers) for each in completions)
    left_out = sum(saved.of(each.index, each.steps) for each in completions)
    print(
        f"{figures['tokens_generated']} tokens in {figures['decode_seconds']:.2f} s"
        f" ({figures['tokens_per_s']:.1f} tokens/s, {trace.forwards} forwards, loading not counted);"
        f" {computed:.0f} positions computed, {left_out:.0f} saved by rules; decoded by {engine.decoder.text}",
        file=sys.stderr,
    )
