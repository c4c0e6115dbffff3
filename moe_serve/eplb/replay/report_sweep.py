"""The cases of a simulation: a table with one line per combination and policy, JSON, and the curve for a page."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from moe_serve.eplb.replay.report import (
    MISSING,
    as_bytes,
    as_number,
    as_percent,
    as_seconds,
    missing_lines,
    printed,
    text_console,
    to_json,
    verdict,
)
from moe_serve.eplb.replay.result import CEILING, FLOOR
from moe_serve.eplb.replay.simulator import Case, are_timed, best_case

_SWEPT = (("ranks", "ranks"), ("num_slots", "slots"), ("window_steps", "window"))


def sweep_to_table(cases: Sequence[Case], width: int | None = None, color: bool = False) -> str:
    """Returns the cases for a terminal: what they have in common first, then a line for each combination and policy."""
    console = text_console(width or 160, color)
    for name, words in cases[0].report.conditions.items():
        if name in ("cluster", "windows") and len(cases) > 1:
            continue
        console.print(Text(f"{name:>10}", style="bold"), "", words, soft_wrap=True)
    console.print()
    table = Table(box=None)
    columns, rows = sweep_cells(cases)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if column == "policy" else "right", style="bold" if index == 0 else "")
    best = best_case(cases)
    for case, cells in rows:
        table.add_row(*cells, style="dim" if cells[4] in (FLOOR, CEILING) else "green" if case is best else "")
    console.print(table)
    for line in missing_lines({name: needs for name, needs in best.report.missing.items() if name in columns}):
        console.print(line, style="dim")
    console.print()
    for sentence in sweep_verdict(cases):
        console.print(sentence, soft_wrap=width is None)
    return printed(console)


def sweep_cells(cases: Sequence[Case]) -> tuple[list[str], list[tuple[Case, list[str]]]]:
    """Returns the columns, and the cells of each line beside its case."""
    columns = ["ranks", "slots", "window", "expert memory", "policy", "served", "min layer", "fit", "of slots", "stall",
               "step time", "tokens/s", "tokens/s/rank"]  # fmt: skip
    rows = []
    for case in cases:
        for row in case.rows():
            rate = row["tokens_per_s"]
            rows.append(
                (
                    case,
                    [
                        str(row["ranks"]),
                        str(row["num_slots"]),
                        str(row["window_steps"]),
                        as_bytes(row["memory_bytes"]) + ("" if row["fits"] else " !"),
                        row["policy"],
                        as_number(row["served_mean"], 4),
                        as_number(row["served_min"], 4),
                        as_number(row["fit_mean"], 4),
                        as_percent(row["moved_share"]) if row["num_rebalances"] else "-",
                        as_seconds(row["stall_s"]),
                        as_seconds(row["step_s"]),
                        MISSING if rate is None else f"{rate:,.0f}",
                        MISSING if rate is None else f"{rate / row['ranks']:,.0f}",
                    ],
                )
            )
    return columns, rows


def sweep_verdict(cases: Sequence[Case]) -> list[str]:
    """Returns which combination to take, and the verdict of its replay."""
    best = best_case(cases)
    out = []
    if len(cases) > 1:
        words = (
            f"{best.topology.num_ranks} ranks, {best.num_slots} slots, windows of {best.window_steps} steps, "
            f"{best.report.best.name}"
        )
        if are_timed(cases):
            out.append(f"Most tokens per second and rank: {words}.")
        else:
            out.append(f"Times are not known, so no combination is named as the fastest. Best balanced: {words}.")
    tight = [case for case in cases if not case.fits]
    if tight:
        worst = max(tight, key=lambda case: case.memory_bytes)
        out.append(
            f"{len(tight)} of {len(cases)} combinations do not fit (!): {worst.num_slots} slots on "
            f"{worst.topology.num_ranks} ranks need {as_bytes(worst.memory_bytes)} for experts alone on each rank."
        )
    return [*out, *verdict(best.report)]


def sweep_to_json(cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the cases as plain JSON types: every line, and the whole report of the best case."""
    return {
        "format": "moe_serve.simulation",
        "rows": [row for case in cases for row in case.rows()],
        "verdict": sweep_verdict(cases),
        "best": to_json(best_case(cases).report),
    }


def sweep_curves(cases: Sequence[Case]) -> dict[str, Any] | None:
    """Returns what a page draws: the swept number against tokens/s/rank, or balancedness; None for one case."""
    if len(cases) < 2:
        return None
    rows = [row for case in cases for row in case.rows()]
    key, label = max(_SWEPT, key=lambda swept: len({row[swept[0]] for row in rows}))
    others = [(name, words) for name, words in _SWEPT if name != key and len({row[name] for row in rows}) > 1]
    timed = are_timed(cases)
    series: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = ", ".join([row["policy"], *(f"{words} {row[other]}" for other, words in others)])
        role = {FLOOR: "floor", CEILING: "ceiling"}.get(row["policy"], "policy")
        line = series.setdefault(name, {"name": name, "role": role, "x": [], "y": []})
        line["x"].append(row[key])
        line["y"].append(row["tokens_per_s"] / row["ranks"] if timed else row["served_mean"])
    columns, cells = sweep_cells(cases)
    return {
        "xLabel": label,
        "yLabel": "predicted tokens/s per rank, moves paid" if timed else "served balancedness",
        "digits": 0 if timed else 3,
        "series": list(series.values()),
        "columns": columns,
        "rows": [line for _, line in cells],
    }
