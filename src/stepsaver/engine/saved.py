"""How many positions were computed, and how many rules left out. One that runs in half of the layers counts as half."""

from collections import Counter
from collections.abc import Iterable

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.engine import Engine
from stepsaver.engine.plan import StepPlan, commit_plan
from stepsaver.engine.trace import SampleStep


class SavedPositions:
    """Give it to `Engine.generate` as `on_step`. Counts what rules left out, by the index of the sample."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._layers, decoding = engine.model.config.layers, engine.decoding
        commit = commit_plan(decoding.block_size, layers=self._layers, prediction=decoding.prediction)
        self._commit = _work(commit) if isinstance(engine.decoder, Denoise) else None
        self._in_steps: Counter[int] = Counter()

    def __call__(self, event: StepEvent) -> None:
        self._in_steps[event.sample.index] += _work(event.unruled) - _work(event.plan)

    def of(self, index: int, steps: Iterable[SampleStep]) -> float:
        """Of one sample, its commits included."""
        commits = [step for step in steps if step.kind == "commit"] if self._commit is not None else []
        saved = self._in_steps[index] + sum((self._commit or 0) - _work(step) for step in commits)
        return saved / (2 * self._layers)


def _work(done: StepPlan | SampleStep) -> int:
    """In positions x layers of attention and of the MLP."""
    return done.attention_run + done.mlp_run


def positions_computed(steps: Iterable[SampleStep], layers: int) -> float:
    return sum(_work(step) / (2 * layers) + step.recomputed_context for step in steps)
