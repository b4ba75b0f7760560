"""`stepsaver score`: log-likelihoods of continuations, by the same loop as generation."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
from stepsaver.engine.defaults import ESTIMATORS
from stepsaver.engine.errors import unknown_name

if TYPE_CHECKING:
    from stepsaver.engine.score import ScoreRequest
    from stepsaver.evaluation.open_model import OpenModel

HELP = "log-likelihoods of continuations"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--requests",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSONL: {"context": "...", "continuation": "..."}; a context may be a list of messages',
    )
    parser.add_argument("--chat", action="store_true", help="a context is a user's message, by the chat template")
    parser.add_argument(
        "--ids", action="store_true", help='lines are {"context_ids": [...], "continuation_ids": [...]}'
    )
    parser.add_argument("--estimator", default="trajectory", help=f"{', '.join(ESTIMATORS)} (default: %(default)s)")
    parser.add_argument("--score-stop", action="store_true", help="append the stop token to every continuation")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from stepsaver.engine.trace import Trace

    if options.estimator not in ESTIMATORS:
        raise unknown_name("estimator", options.estimator, ESTIMATORS)
    opened = open_chosen_model(options)
    requests = list(_read_requests(options, opened))
    engine = build_engine(options, opened)
    trace = Trace()
    found = engine.score(requests, estimator=options.estimator, score_stop=options.score_stop, trace=trace)
    with opened.blamed():
        scores = sorted(progress(found, total=len(requests), label="scoring"), key=lambda each: each.index)
    if options.json:
        document = {
            "scores": [
                {"loglikelihood": each.loglikelihood, "is_greedy": each.is_greedy, "steps": each.steps}
                for each in scores
            ],
            "cost": cost_document(engine, trace),
            "throughput": throughput(trace, tokens_scored=trace.tokens_scored) | {"requests": len(requests)},
            "engine": describe_engine(engine, options.model) | {"estimator": options.estimator},
        }
        print(json.dumps(document))
    else:
        for each in scores:
            print(f"{each.loglikelihood:.6f}\t{'greedy' if each.is_greedy else 'other'}\t{each.steps} steps")
    return 0


def _read_requests(options: argparse.Namespace, opened: "OpenModel") -> "Iterator[ScoreRequest]":
    from stepsaver.engine.decoding_settings import Prompt, check_prompt
    from stepsaver.engine.score import ScoreRequest
    from stepsaver.evaluation.encoding import context_text, encode_pair

    for number, entry in read_json_lines(options.requests):
        where = f"{options.requests} line {number}"
        if options.ids:
            request = ScoreRequest(id_list(entry, "context_ids", where), id_list(entry, "continuation_ids", where))
        else:
            context, continuation = entry.get("context"), text_of(entry, "continuation", where)
            if not isinstance(context, list):
                context = text_of(entry, "context", where)
            context = context_text(opened.tokenizer, context, where, chat=options.chat)
            request = ScoreRequest(*encode_pair(opened.tokenizer, context, continuation))
        longest = len(request.continuation_ids) + 1
        check_prompt(Prompt(request.context_ids), opened.config, opened.decoding, longest, where)
        if request.continuation_ids:
            check_prompt(Prompt(request.continuation_ids), opened.config, opened.decoding, 0, where)
        yield request
