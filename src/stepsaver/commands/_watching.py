"""Watching while prompts are decoded: `--trace`, `--trace-against` and `--watch`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepsaver.commands._outputs import check_output_file
from stepsaver.engine.defaults import DECODE
from stepsaver.engine.errors import UsageError

if TYPE_CHECKING:
    from stepsaver.engine.batch import StepEvent
    from stepsaver.engine.engine import Completion, Engine, Prompt
    from stepsaver.engine.rules.rule import Rule
    from stepsaver.engine.trace import Trace
    from stepsaver.evaluation.open_model import OpenModel
    from stepsaver.report.watch import Watch

STEP_SECONDS = 0.3  # for which --watch shows a step
MOST_SECONDS = 3600  # for which a step is shown
OnStep = Callable[["StepEvent"], None]
TokenText = Callable[[int], str]


class Decode(Protocol):
    """Decodes the command's prompts with an engine. Returns the completions in the prompts' order."""

    def __call__(self, engine: "Engine", trace: "Trace", recorder: OnStep | None = None) -> "list[Completion]": ...


def add_watching_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument(
        "--trace", type=Path, metavar="FILE.html", help="write a page that plays the decode step by step"
    )
    group.add_argument(
        "--trace-against",
        action="append",
        metavar="R",
        help="decode again with this rule instead of --rule, `none` for no reuse, and let the page play both in step,"
        " their first difference marked; may be repeated to combine rules",
    )
    group.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=STEP_SECONDS,
        metavar="SECONDS",
        help=f"show the decode live in the terminal, each step for at least so long (default: {STEP_SECONDS});"
        " of samples decoded together, one at a time",
    )


def check_watching(options: argparse.Namespace, opened: "OpenModel") -> "tuple[Rule, ...] | None":
    """Raises, before the weights are read, for what would fail after the decode. Returns a second decode's rules."""
    from stepsaver.engine.rules.rule import check_rules, parse_rule

    if options.watch is not None and not 0 <= options.watch <= MOST_SECONDS:
        raise UsageError(f"--watch {options.watch}: not a number of seconds from 0 to {MOST_SECONDS}")
    if options.watch is not None and not sys.stderr.isatty():
        raise UsageError("--watch needs a terminal; --trace FILE.html writes a page instead")
    check_output_file("--trace", options.trace)
    if not options.trace_against:
        return None
    if options.trace is None:
        raise UsageError("--trace-against needs --trace")
    named = [] if options.trace_against == ["none"] else options.trace_against
    if options.decode not in (None, DECODE):
        raise UsageError(f"--trace-against compares rules, and {options.decode} takes none")
    rules = tuple(parse_rule(text) for text in named)
    check_rules(rules, opened.decoding, opened.config.layers)
    return rules


def watch_of(options: argparse.Namespace, engine: "Engine", prompts: int, text: TokenText) -> "Watch | None":
    """Returns the live view, or None if it is not wanted."""
    if options.watch is None:
        return None
    from stepsaver.report.watch import Watch

    return Watch(engine, prompts, text, seconds=options.watch)


def on_each_step(watchers: Sequence[OnStep | None]) -> OnStep | None:
    """Returns one callback for all watchers, or None if there are none."""
    present = [each for each in watchers if each is not None]

    def on_step(event: "StepEvent") -> None:
        for each in present:
            each(event)

    return on_step if present else None


def decode_traced(
    options: argparse.Namespace,
    decode: Decode,
    engine: "Engine",
    trace: "Trace",
    *,
    against: "tuple[Rule, ...] | None",
    prompts: "list[Prompt]",
    text: TokenText,
) -> "list[Completion]":
    """Decodes, a second time with the rules `against` if they are given, and writes the page that plays it. Returns the
    completions of the first decode.
    """
    from stepsaver.engine.decoders.denoise import Denoise
    from stepsaver.engine.engine import Engine
    from stepsaver.engine.policies.threshold import Threshold
    from stepsaver.engine.trace import Trace
    from stepsaver.report.html_pages import trace_page
    from stepsaver.report.trace_data import TraceRecorder, trace_document

    engines, ids = [engine], [prompt.ids for prompt in prompts]
    if against is not None:
        engines.append(
            Engine(
                engine.model,
                decoder=Denoise(engine.decoder.policy or Threshold(), against),
                batch_size=engine.batch_size,
                decoding=engine.decoding,
            )
        )
    runs, completions = [], []
    for index, each in enumerate(engines):
        recorder = TraceRecorder(each)
        completions.append(decode(each, Trace() if index else trace, recorder))
        runs.append(recorder.runs(ids, completions[-1]))
    document = trace_document(options.model, ids, engines, runs, text)
    options.trace.write_text(trace_page(document), encoding="utf-8")
    return completions[0]
