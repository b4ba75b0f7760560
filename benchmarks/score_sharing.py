"""Four-choice scoring: contexts of about 500 tokens, one-token choices. Shared prefills against each request alone."""

import argparse
from statistics import median
from time import perf_counter

import torch

from benchmarks.shapes import SHAPES
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import random_model
from stepsaver.engine.score import ScoreRequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = random_model(SHAPES["135M"], dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    requests = []
    for place in range(options.questions):
        context = torch.randint(3, model.config.vocab, (490 + 7 * place,), generator=generator).tolist()
        choices = torch.randint(3, model.config.vocab, (4,), generator=generator).tolist()
        requests += [ScoreRequest(tuple(context), (choice,)) for choice in choices]
    shared, alone = Engine(model, batch_size=16), Engine(model, batch_size=1)
    next(iter(alone.score(requests[:1])))
    ratios: list[float] = []
    for _ in range(options.repeats):
        started = perf_counter()
        together = sorted(shared.score(requests), key=lambda score: score.index)
        middle = perf_counter()
        one_by_one = [next(iter(alone.score([request]))) for request in requests]
        ended = perf_counter()
        ratios.append((ended - middle) / (middle - started))
        worst = max(abs(a.loglikelihood - b.loglikelihood) for a, b in zip(together, one_by_one, strict=True))
        assert worst < 1e-4, f"scores differ by {worst}"
    print(
        f"{len(requests)} requests: {median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}] "
        f"as many requests per second as each alone, scores equal to 1e-4; {options.repeats} repeats, "
        f"{torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
