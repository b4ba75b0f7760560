"""Tokens per forward of speculative decoding, by where a forward's positions go: the table of docs/speculative.md.

Counts, no timing: prefills are left out, but for those that share a forward with a first round. The two other rules
for branches are from papers and only for comparison: a branch for every number of accepted tokens (TiDAR,
arXiv 2511.08923), and at most two where the model is not sure, and one behind the draft (Reciprocal Guidance, 2026),
here without its second candidates.

    python -m benchmarks.speculative --problems 240
    python -m benchmarks.speculative --problems 64 --noise 0.7
    python -m benchmarks.speculative --curve benchmarks/measured/positions_free_to_64.json
    python -m benchmarks.speculative --model FOLDER --prompts golden.json
"""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file

from stepsaver.engine.batch import BatchContext
from stepsaver.engine.curve import read_curve
from stepsaver.engine.decoders.budget import Budget
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.speculative import DraftedSample, Round, Speculative
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.embedded import DATA_FOLDER, MODEL_FOLDER
from stepsaver.evaluation.encoding import encode_prompt
from stepsaver.evaluation.tokenizer import TextTokenizer

OURS = (8, 12, 16, 18, 20, 24, 32, 40, 44, 48, 56, 64)
RISKY = 0.5  # chance below which Reciprocal Guidance puts a branch


@dataclass(frozen=True)
class EveryNumber(Speculative):
    """A whole branch for every number of accepted tokens."""

    name: ClassVar[str] = "a branch for every number"

    def _round(self, batch: BatchContext, sample: DraftedSample, budget: Budget, limit: int) -> Round:
        draft = sample.draft[: limit - sample.known]
        ids = draft.ids.tolist()
        return Round(draft, [self._whole(batch, sample, ids, each) for each in range(len(ids) + 1)])

    def _whole(self, batch: BatchContext, sample: DraftedSample, draft: list[int], accepted: int) -> int:
        ends = accepted == len(draft) > 0 and draft[-1] in batch.decoding.stop_ids
        return 0 if ends else max(0, min(self.span, sample.request.end - sample.known - accepted - 1))


@dataclass(frozen=True)
class Reciprocal(EveryNumber):
    """Whole branches at the first two risky positions, and behind the draft if there are no more."""

    name: ClassVar[str] = "Reciprocal Guidance's rule"

    def _round(self, batch: BatchContext, sample: DraftedSample, budget: Budget, limit: int) -> Round:
        draft, branches = EveryNumber._round(self, batch, sample, budget, limit)
        risky = [index for index, sure in enumerate(draft.confidence) if sure < RISKY]
        kept = {*risky[:2], *([len(draft.ids)] if len(risky) <= 2 else [])}
        return Round(draft, [count if index in kept else 0 for index, count in enumerate(branches)])


def counted(
    model: Transformer, decoder: Decoder, prompts: Sequence[Prompt], args: argparse.Namespace
) -> tuple[float, float, list[list[int]]]:
    """Tokens and positions a forward, and the texts."""
    trace, curve = Trace(), read_curve(args.curve) if args.curve else None
    engine = Engine(model, decoder=decoder, batch_size=args.batch_size, curve=curve)
    made = engine.generate(
        prompts, max_new_tokens=args.limit, sampling=Sampling(args.temperature, args.top_p), trace=trace
    )
    texts = [each.ids for each in sorted(made, key=lambda each: each.index)]
    positions = sum(entry.rows for entry in trace.entries if entry.kind != "prefill")
    return trace.tokens_generated / trace.sample_forwards, positions / trace.sample_forwards, texts


def less_sure(folder: Path, noise: float) -> Transformer:
    """A checkpoint with normal noise on every weight matrix, so large against the spread of its numbers."""
    draw = torch.Generator().manual_seed(0)
    with TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "model"))
        for path in copy.glob("*.safetensors"):
            weights = load_file(path)
            for name, each in weights.items():
                if each.dim() == 2:
                    wide = each.float()
                    weights[name] = (wide + noise * wide.std() * torch.randn(each.shape, generator=draw)).to(each.dtype)
            save_file(weights, path)
        return load_model(copy, dtype=torch.float32)


def word_problems(count: int) -> list[Prompt]:
    tokenizer = TextTokenizer(MODEL_FOLDER)
    lines = (DATA_FOLDER / "mini_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [Prompt(tuple(encode_prompt(tokenizer, json.loads(line)["question"], chat=True))) for line in lines]


def golden_prompts(path: Path) -> list[Prompt]:
    cases = json.loads(path.read_bytes())["cases"]
    found = {tuple(prompt): None for case in cases for prompt in case.get("prompts") or [case["prompt"]]}
    return [Prompt(each) for each in found]


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument(
        "--noise", type=float, help="makes the model less sure: 0.7 halves what block diffusion unmasks"
    )
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--prompts", type=Path, help="a golden.json, for a model that has no tokenizer")
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--span", type=int, default=16)
    parser.add_argument("--curve", type=Path, help="by which positions=auto decides")
    parser.add_argument("--only", nargs="+", help="these decoders instead of the table's")
    args = parser.parse_args(argv)
    model = less_sure(args.model, args.noise) if args.noise else load_model(args.model, dtype=torch.float32)
    prompts = golden_prompts(args.prompts) if args.prompts else word_problems(args.problems)
    decoders = [parse_decoder(text) for text in args.only or ("block", "autoregressive")]
    if not args.only:
        decoders += [Speculative(0, args.span), Reciprocal(256, args.span), EveryNumber(256, args.span)]
        decoders += [Speculative(positions, args.span) for positions in OURS]
        decoders += [Speculative("auto", args.span)] if args.curve else []
    say("| decoder | tokens per forward | positions per forward | text of autoregressive decoding | s |")
    say("|---|---|---|---|---|")
    reference = counted(model, parse_decoder("autoregressive"), prompts, args)[2]
    for decoder in decoders:
        started = perf_counter()
        tokens, positions, texts = counted(model, decoder, prompts, args)
        same = sum(one == other for one, other in zip(texts, reference, strict=True))
        name = decoder.name if isinstance(decoder, EveryNumber) else f"`{decoder.text}`"
        seconds = perf_counter() - started
        say(f"| {name} | {tokens:.2f} | {positions:.1f} | {same} of {len(prompts)} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
