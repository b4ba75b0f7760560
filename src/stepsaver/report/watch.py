"""A decode live in the terminal: the text so far, the block's rows, which layers run on them, and what it cost."""

from collections.abc import Callable, Iterator
from math import nan
from time import sleep
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.engine import Engine
from stepsaver.engine.plan import LayerPositions, LayerRun
from stepsaver.engine.positions import first_position
from stepsaver.engine.state import Sample

TEXT_TOKENS, TEXT_LINES = 400, 8  # that are shown of the text's end
MASK, HIDDEN = "░", "┄"
COMPUTED, CHANGED, PARTLY, REUSED, KEYS, SKIPPED = "blue", "dark_orange", "cyan", "green", "grey50", "grey23"
UNMASKED = "bold black on yellow"
KINDS = {
    "full": "full step",
    "sub": "sub-block step",
    "reused": "no forward",
    "draft": "draft",
    "verify": "verification",
}


class Watch:
    """Give it to `Engine.generate` as `on_step`. Follows one sample to its end, then another one."""

    def __init__(
        self,
        engine: Engine,
        samples: int,
        text: Callable[[int], str],
        *,
        seconds: float = 0.0,
        console: Console | None = None,
    ) -> None:
        self._mask_id = engine.decoding.mask_id
        self._samples = samples
        self._text = text
        self._seconds = seconds
        self._followed: Sample | None = None
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: StepEvent) -> None:
        if self._followed is None or self._followed.is_finished:
            self._followed = event.sample
        if event.sample is self._followed:
            self._live.update(self.view(event), refresh=True)
            sleep(self._seconds)

    def view(self, event: StepEvent) -> Group:
        gap, shown = Text(), [self._heading(event), Text(), self._words(event), *self._branches(event)]
        return Group(*shown, gap, _rows(event), _legend(), gap, _totals(event))

    def _branches(self, event: StepEvent) -> Iterator[Text]:
        """A line for each branch of speculative decoding; the one that is the next draft is lit."""
        for accepted, tokens, is_taken in event.branches:
            words = "".join(map(self._printable, tokens)).replace("\n", "⏎")
            line = Text(f"{accepted:3} accepted: {words}", "bold yellow" if is_taken else "dim", no_wrap=True)
            line.truncate(self._live.console.width, overflow="ellipsis")
            yield line

    def _heading(self, event: StepEvent) -> Text:
        plan, sample = event.plan, event.sample
        return Text(
            f"sample {sample.index + 1} of {self._samples} · block at position {event.start} · "
            f"{KINDS[plan.kind]} · {plan.positions} positions · {event.unmasked.bit_count()} unmasked",
            style="bold",
        )

    def _words(self, event: StepEvent) -> Text:
        """Returns the end of the text, from the prompt into the block."""
        sample = event.sample
        words = Text()
        start = max(0, len(sample.context) - TEXT_TOKENS)
        for position, token in enumerate(sample.context[start:], start):
            words.append(self._printable(token), "dim" if position < len(sample.request.prompt) else "")
        for position, token in enumerate(sample.block.tokens.tolist(), sample.block.start):
            row = position - event.start  # a draft's rows do not begin with the block's
            is_here = 0 <= row < len(event.tokens)
            if token == self._mask_id:
                words.append(MASK, _confidence_style(float(event.confidence[row]) if is_here else nan))
            else:
                is_given = position < len(sample.request.prompt)
                style = UNMASKED if is_here and event.unmasked >> row & 1 else "dim" if is_given else ""
                words.append(self._printable(token), style)
        console = self._live.console
        return Text("\n").join(words.wrap(console, console.width)[-TEXT_LINES:])

    def _printable(self, token: int) -> str:
        """Returns the token's text without anything that a terminal would obey."""
        return "".join(
            each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in self._text(token)
        )


def _rows(event: StepEvent) -> Table:
    """A column per row of the block: its confidence or token state, then a line per group of layers that run alike."""
    size, width = len(event.tokens), 2 if len(event.tokens) <= 32 else 1
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    grid.add_column(no_wrap=True)
    first, count = first_position(event.sub_block), event.sub_block.bit_count()
    grid.add_row("sub-block", Text(" " * width * first + "▁" * width * count, "cyan"))
    line = Text()
    for row in range(size):
        line.append(*_row_mark(event, row, width))
    grid.add_row("position", line)
    for run in event.plan.runs:
        line = Text()
        for row in range(size):
            mark = HIDDEN if event.plan.hidden >> row & 1 else "■"
            line.append(mark.ljust(width), _cell_style(event, run, row))
        grid.add_row(_layers_label(run), line)
    return grid


_LEGEND = (
    (COMPUTED, "computed"),
    (CHANGED, "changed"),
    (PARTLY, "one part"),
    (REUSED, "reused"),
    (KEYS, "keys only"),
    (SKIPPED, "skipped"),
)


def _legend() -> Text:
    legend = Text()
    for style, name in _LEGEND:
        legend.append("■ ", style)
        legend.append(name + " ", "dim")
    legend.append(f"{HIDDEN} ", SKIPPED)
    legend.append("not there yet", "dim")
    return legend


def _row_mark(event: StepEvent, row: int, width: int) -> tuple[str, str]:
    if event.unmasked >> row & 1:
        return "◆".ljust(width), "bold yellow"
    if event.plan.hidden >> row & 1:
        return HIDDEN.ljust(width), SKIPPED
    if event.plan.kind == "verify" and event.masked >> row & 1 and row < len(event.tokens) - 1:
        return "✗".ljust(width), "red"  # drafted, and not what the causal rows say
    if event.masked >> row & 1:
        return MASK * width, _confidence_style(float(event.confidence[row]))
    return "·".ljust(width), ""


def _confidence_style(confidence: float) -> str:
    """Returns a colour: the surer, the brighter; dark if no step has computed the confidence."""
    level = 100 + int(155 * confidence) if confidence == confidence else 100
    return f"rgb({level // 2},{level * 3 // 4},{level})"


def _cell_style(event: StepEvent, run: LayerRun, row: int) -> str:
    bit = 1 << row
    rows: LayerPositions = run.positions
    if rows.attention & rows.mlp & bit:
        has_been_computed = event.sample.steps[-1].step > 0  # in a block's first step nothing can have changed
        return CHANGED if event.changed & bit and has_been_computed else COMPUTED
    if (rows.attention | rows.mlp) & bit:
        return PARTLY
    if event.plan.carried(run.last - 1) & bit:
        return REUSED
    return KEYS if rows.keys_values & bit else SKIPPED


def _layers_label(run: LayerRun) -> str:
    return f"layer {run.first}" if run.last == run.first + 1 else f"layers {run.first}-{run.last - 1}"


def _totals(event: StepEvent) -> Text:
    steps = event.sample.steps
    attention, mlp = sum(step.attention_run for step in steps), sum(step.mlp_run for step in steps)
    reused = sum(step.mlp_reused for step in steps)
    return Text(
        f"{len(event.sample.generated):,} tokens · {sum(step.rows > 0 for step in steps):,} forwards · "
        f"positions x layers: {attention:,} attention, {mlp:,} MLP, {reused:,} reused"
    )
