"""Reports of a replay: tables for the terminal, JSON for programs, and a verdict about the limit that binds.

report_html.py draws the same numbers. Measured times stand apart in the JSON: the rest is the same on every run of the
same trace.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport
from moe_serve.eplb.split.limit import where_no_split_helps

MISSING = "n/a"
NUM_SHOWN = 30  # newest decisions of a table; the JSON report has all


def to_table(report: ReplayReport, width: int | None = None, color: bool = False) -> str:
    """Returns the report for a terminal. width: characters a line; None = as wide as it takes, at most 160."""
    console = text_console(width or 160, color)
    for name, words in report.conditions.items():
        console.print(Text(f"{name:>10}", style="bold"), "", words, soft_wrap=True)
    console.print()
    console.print(_table("balancedness: mean / max of rank load (1 = perfect)", *balance_cells(report), report))
    console.print()
    console.print(_table("what it takes (plan: CPU time)", *cost_cells(report), report))
    for line in missing_lines(report.missing):
        console.print(line, style="dim")
    console.print()
    for result in report.policies:
        if result.decisions:
            console.print(_decision_table(result))
            console.print()
    for sentence in verdict(report):
        console.print(sentence, soft_wrap=width is None)
    return printed(console)


def _table(title: str, columns: list[str], rows: list[list[str]], report: ReplayReport) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column(columns[0], style="bold")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for result, cells in zip(report.results, rows, strict=True):
        table.add_row(*cells, style=_style(result, report))
    return table


def balance_cells(report: ReplayReport) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and cells of the balance table, one row per result."""
    names = ("served_mean", "served_p50", "served_min", "worst", "fit_mean", "fit_min", "bound_mean")
    rows = []
    for result in report.results:
        row = report.summary(result)
        rows.append([result.name, *(as_number(row[name], 4) for name in names)])
    return ["policy", "served", "median", "min layer", "worst", "fit", "fit min", "bound"], rows


def cost_cells(report: ReplayReport) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and cells of the cost table, one row per result."""
    columns = ["policy", "rebalances", "moves", "of slots", "bytes", "stall", "off-node", "active experts", "plan",
               "step time", "tokens/s"]  # fmt: skip
    rows = []
    for result in report.results:
        row = report.summary(result)
        per_plan = result.plan_s[result.plan_s > 0]
        rows.append(
            [
                result.name,
                str(row["num_rebalances"]),
                f"{row['moves']:,}",
                f"{row['moved_share']:.1%}" if row["num_rebalances"] else "-",
                as_bytes(row["bytes"]),
                as_seconds(row["stall_s"]),
                "-" if result.name == CEILING else as_percent(row["off_node"]),
                "-" if result.name == CEILING else MISSING if row["activated"] is None else f"{row['activated']:.1f}",
                "-" if not len(per_plan) else f"{per_plan.mean() * 1e3:.1f} ms",
                as_seconds(row["step_s"]),
                MISSING if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            ]
        )
    return columns, rows


def missing_lines(missing: dict[str, str]) -> list[str]:
    """Returns one line per reason why columns are not filled. missing: column -> what it needs"""
    by_need: dict[str, list[str]] = {}
    for column, needs in missing.items():
        by_need.setdefault(needs, []).append(column)
    return [f"{MISSING}: {', '.join(names)} need{'s' * (len(names) == 1)} {needs}" for needs, names in by_need.items()]


def _style(result: PolicyResult, report: ReplayReport) -> str:
    if result.name in (FLOOR, CEILING):
        return "dim"
    return "green" if result is report.best and len(report.policies) > 1 else ""


def _decision_table(result: PolicyResult) -> Table:
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


def verdict(report: ReplayReport) -> tuple[str, ...]:
    """Returns a few sentences: what was gained, which limit binds, what to change, and which rules were not kept."""
    if not report.policies:
        return ("No policy was replayed; name one with --policy.",)
    best, floor = report.best, report.floor
    row, base = report.summary(best), report.summary(floor)
    sentences = [_gain(row, base)]
    served, fit, bound = row["served_mean"], row["fit_mean"], row["bound_mean"]
    losses = {"load": 1 - served}
    if fit is not None and bound is not None:
        losses = {"slots": 1 - bound, "packing": max(bound - fit, 0.0), "age": max(fit - served, 0.0)}
    limit = max(losses, key=lambda name: losses[name])
    if served >= 0.985:
        sentences.append(f"The ranks are as good as balanced ({served:.3f}); no limit is worth attacking.")
    elif limit == "slots":
        sentences.append(
            f"Slots bind: even an ideal placement with {report.num_slots} slots reaches "
            f"{bound:.3f}. {_more_slots(report)}"
        )
    elif limit == "packing":
        sentences.append(
            f"Packing binds: {best.name} reaches {fit:.3f} where {bound:.3f} is possible. Try --policy refined, or "
            f"raise --off-home if the node hierarchy holds experts at home."
        )
    elif limit == "age":
        sentences.append(_age(report, best, fit, served))
    no_split = None if best.final is None else where_no_split_helps(report.load, best.final)
    if no_split is not None:
        sentences.append(f"Of the last placement of {best.name} on all windows together: {no_split}")
    sentences += _economics(report, best, row, base)
    sentences += [sentence for result in report.policies for sentence in result.unkept]
    return tuple(sentences)


def _gain(row: dict[str, Any], base: dict[str, Any]) -> str:
    text = (
        f"{row['policy']} serves at balancedness {row['served_mean']:.3f}, doing nothing at {base['served_mean']:.3f}: "
        f"the busiest rank works {_over(row['served_mean'])} instead of {_over(base['served_mean'])} over the mean"
    )
    if row["tokens_per_s"] and base["tokens_per_s"]:
        change = row["tokens_per_s"] / base["tokens_per_s"] - 1
        text += f", {change:+.1%} tokens/s with its moves paid for"
    return text + "."


def _over(balance: float) -> str:
    return f"{1 / max(balance, 1e-9) - 1:.0%}"


def _more_slots(report: ReplayReport) -> str:
    served = [(slots, mean) for slots, mean, _ in report.redundancy if slots > report.num_slots]
    enough = next(((slots, mean) for slots, mean in served if mean >= 0.98), served[-1] if served else None)
    if enough is None:
        return "Add slots (--slots), or fewer ranks for the same experts."
    slots, mean = enough
    extra = (slots - report.num_slots) // report.num_ranks
    cost = "" if report.expert_bytes is None else (
        f", {as_bytes(extra * report.expert_bytes * len(report.moe_layer_ids))} more memory on each rank"
    )  # fmt: skip
    return f"{slots} slots ({extra} more a rank{cost}) would fit at {mean:.3f}."


def _age(report: ReplayReport, best: PolicyResult, fit: float, served: float) -> str:
    per_cell = float(report.load.mean()) / max(len(best.served), 1)
    noise = 1 / np.sqrt(max(per_cell * report.load.shape[1] / report.num_ranks, 1e-9))
    text = (
        f"Age binds: plans fit their own window at {fit:.3f}, but the next one differs and is served at {served:.3f}. "
    )
    if noise > 0.5 * (1 - served):
        return text + (
            f"With {per_cell:.0f} tokens an expert and window much of that is chance: use longer windows (--window) or "
            f"more of them (--history)."
        )
    return text + "Plan more often on shorter windows; a better packer would not help."


def _economics(report: ReplayReport, best: PolicyResult, row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    out = []
    if row["tokens_per_s"] and base["tokens_per_s"]:
        losers = [
            result.name
            for result in report.policies
            if report.total_seconds(result) > 1.01 * report.total_seconds(report.floor)
        ]
        if losers:
            out.append(f"Moving costs more than it brings for {', '.join(losers)}: rebalance less often, or gate it.")
        ceiling = report.total_seconds(report.results[-1])
        out.append(
            f"Perfect balance would need {ceiling / report.total_seconds(best):.0%} of the time that {best.name} needs."
        )
    lean = min(
        (r for r in report.policies if r.served.mean() >= best.served.mean() - 0.01),
        key=lambda r: int(r.moves.sum()),
    )
    if lean is not best and best.moves.sum() > 2 * lean.moves.sum():
        saved = 1 - lean.moves.sum() / best.moves.sum()
        out.append(f"{lean.name} serves within 0.01 of that with {saved:.0%} fewer moves.")
    return out


def to_json(report: ReplayReport) -> dict[str, Any]:
    """Returns the report as plain JSON types; all but "timings" is the same on every run."""
    return {
        "format": "moe_serve.replay_report",
        "conditions": report.conditions,
        "policies": [report.summary(result) for result in report.results],
        "verdict": list(verdict(report)),
        "missing": report.missing,
        "redundancy": [{"num_slots": s, "mean": mean, "min": low} for s, mean, low in report.redundancy],
        "windows": {
            "first_step": report.first_steps.tolist(),
            "num_steps": report.num_steps.tolist(),
            "policies": {result.name: _series(result) for result in report.results},
        },
        "decisions": {
            result.name: [asdict(each) for each in result.decisions] for result in report.policies if result.decisions
        },
        "timings": {
            result.name: {"plan_s_mean": float(times.mean()), "plan_s_max": float(times.max())}
            for result in report.policies
            if len(times := result.plan_s[result.plan_s > 0])
        },
    }


def _series(result: PolicyResult) -> dict[str, list[float | None]]:
    def known(values: np.ndarray) -> list[float | None]:
        return [float(value) if np.isfinite(value) else None for value in values]

    return {
        "served_mean": known(result.served.mean(axis=1)),
        "served_min": known(result.served.min(axis=1)),
        "fit_mean": known(result.fit.mean(axis=1)),
        "moves": [int(value) for value in result.moves],
        "off_node": known(result.off_node),
        "step_s": known(result.step_s),
        "stall_s": known(result.stall_s),
    }


def as_number(value: float | None, digits: int) -> str:
    """Returns a plain number; "-" where it has no meaning."""
    return "-" if value is None else f"{value:.{digits}f}"


def as_percent(value: float | None) -> str:
    """Returns a share in percent."""
    return MISSING if value is None else f"{value:.1%}"


def as_seconds(value: float | None) -> str:
    """Returns a time with its unit."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:.2f} s" if size >= 1 else f"{value * 1e3:.2f} ms" if size >= 1e-3 else f"{value * 1e6:.0f} µs"


def as_bytes(value: int | None) -> str:
    """Returns a size in decimal units."""
    if value is None:
        return MISSING
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"


def text_console(width: int, color: bool) -> Console:
    """Returns a console that keeps what is printed, for `printed`. width: characters a line"""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
    )


def printed(console: Console) -> str:
    """Returns what was printed to a `text_console`, without blanks at the ends of lines."""
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
