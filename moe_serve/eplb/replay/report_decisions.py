"""The decisions of a rebalancer in a replay, as a table for the terminal: when, what, why, and for how much gain."""

from collections.abc import Sequence

from rich.table import Table

from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.report_units import as_seconds
from moe_serve.eplb.replay.result import PolicyResult

NUM_SHOWN = 30  # newest decisions; the JSON report has all


def decision_table(result: PolicyResult) -> Table:
    """Returns a policy's newest decisions, oldest first."""
    hidden = len(result.decisions) - NUM_SHOWN
    note = f"; {hidden} earlier ones are in --json" if hidden > 0 else ""
    table = Table(title=f"decisions of {result.name}{note}", title_justify="left", box=None)
    for name in ("step", "decision", "layers", "gain", "cost", "why"):
        table.add_column(name, justify="left" if name in ("decision", "why") else "right")
    for cells in decision_cells(result.decisions[-NUM_SHOWN:]):
        table.add_row(*cells)
    return table


def decision_cells(decisions: Sequence[Decision]) -> list[list[str]]:
    """Returns a row of cells for each decision: step, kind, layers, gain, cost, reason.

    A gain is predicted over the horizon; of "watch" it is what the last move has gained, of what it had promised.
    """
    rows = []
    for each in decisions:
        gain = as_seconds(each.gain_s) if each.gain_s else ""
        if each.kind == "watch":
            gain = f"{as_seconds(each.realised_s)} of {as_seconds(each.gain_s)}"
        layers = str(len(each.layer_rows)) if each.layer_rows else ""
        rows.append(
            [str(each.step), each.kind, layers, gain, as_seconds(each.cost_s) if each.cost_s else "", each.reason]
        )
    return rows
