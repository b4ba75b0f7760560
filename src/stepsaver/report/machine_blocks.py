"""The row costs of the machines that a task was run on, from which `predicted` is computed."""

from stepsaver.engine.row_costs import RowCosts
from stepsaver.report.blocks import Block, cell, number, table
from stepsaver.report.cells import ReportTask

COLUMNS = ("rows", "forward", "attention of a layer", "MLP of a layer", "head", "in all")


def machine_blocks(task: ReportTask) -> list[Block]:
    """Returns a table per session that measured row costs; sessions whose timings cannot be compared did not."""
    return [_costs_table(session, costs) for session, costs in task.row_costs.items()]


def _costs_table(session: str, costs: RowCosts) -> Block:
    rows = [
        [cell(str(rows), rows), *(number(1000 * each, ".3g") for each in seconds)]
        for rows, *seconds in costs_rows(costs)
    ]
    return table(f"What rows take, session {session}", COLUMNS, rows, caption=_caption(costs), name=f"rows-{session}")


def costs_rows(costs: RowCosts) -> list[tuple[int, float, float, float, float, float]]:
    """Returns, by number of rows, the seconds of each part and of a forward of all layers."""
    wholes = map(costs.whole_forward, costs.rows)
    return list(zip(costs.rows, costs.forward, costs.attention, costs.mlp, costs.head, wholes, strict=True))


def _caption(costs: RowCosts) -> str:
    return (
        f"Milliseconds of one forward by the number of its packed rows. {costs_text(costs)} "
        "`Predicted` is by these figures."
    )


def costs_text(costs: RowCosts) -> str:
    """Returns all but the curves, in words."""
    return (
        f"{costs.device}, {costs.threads} threads, {costs.dtype}, weights of {costs.weights}; {costs.shape}. "
        f"Planning takes {1e6 * costs.tick:.0f} µs a tick, {1e6 * costs.sample:.0f} µs a sample and "
        f"{1e6 * costs.rule:.1f} µs a rule and sample ({1e6 * costs.history:.0f} µs more with deltas), packing "
        f"{1e6 * costs.step:.0f} µs a step, attention {1e9 * costs.context_row:.2g} ns a query, row of context and "
        f"layer, and {1e9 * costs.cached_row:.2g} ns a step, row of context and layer. "
        f"A forward costs as much as {costs.forward_rows:.0f} rows beside its own. "
        f"Measured in {costs.measuring:.1f} s."
    )
