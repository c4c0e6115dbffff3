"""Reports of a replay: tables for the terminal, JSON for programs, one page for a browser, and a verdict.

The verdict says which limit binds. Measured times stand apart in the JSON: the rest is the same on every run of the
same trace. The page is one self-contained HTML file, the numbers as JSON and a small script that draws them; it asks
nothing of a network. In it, big tables travel as bytes, 0..255: rank load over mean - span .. mean + span, the busiest
rank of a layer over 1..3 times the mean, expert load as log2 of load over mean, -3..+3.
"""

import base64
import html
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.eplb.load import PHASES
from moe_serve.eplb.rebalance.events import Decision
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport
from moe_serve.eplb.split.limit import where_no_split_helps

MISSING = "n/a"
NUM_SHOWN = 30  # newest decisions of a table; the JSON report has all
_MAX_COLUMNS = 600  # of a picture or line over windows


def to_table(report: ReplayReport, color: bool = False) -> str:
    """Returns the report for a terminal, in tables of at most 160 characters a line."""
    console = text_console(160, color)
    for name, words in report.conditions.items():
        console.print(Text(f"{name:>10}", style="bold"), "", words, soft_wrap=True)
    console.print()
    console.print(_table("balancedness: mean / max of rank load (1 = perfect)", *balance_cells(report), report))
    console.print()
    console.print(_table("what it takes (plan: CPU time)", *cost_cells(report), report))
    for line in missing_lines(report.missing):
        console.print(line, style="dim")
    console.print()
    if len(set(report.phases)) > 1:
        console.print(_table("phases side by side", *phase_cells(report), report))
        console.print()
    for result in report.policies:
        if result.decisions:
            console.print(_decision_table(result))
            console.print()
    for sentence in verdict(report):
        console.print(sentence, soft_wrap=True)
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
        rows.append([result.name, *(as_number(row[name]) for name in names)])
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


def layer_rows(report: ReplayReport) -> list[dict[str, Any]]:
    """Returns a row for each layer: how it was served doing nothing and with the best policy, and what that cost.

    hottest: load of its hottest expert over the mean;  bytes: None where the size of an expert is not known
    """
    floor, best, size = report.floor, report.best, report.expert_bytes
    mean = np.maximum(report.load.mean(axis=1), 1e-12)
    received = best.received.sum(axis=1)
    return [
        {
            "layer": layer,
            "hottest": round(float(report.load[row].max() / mean[row]), 3),
            "nothing": round(float(floor.served[:, row].mean()), 5),
            "served": round(float(best.served[:, row].mean()), 5),
            "worst": round(float(best.served[:, row].min()), 5),
            "received": int(received[row]),
            "bytes": None if size is None else int(received[row]) * size,
        }
        for row, layer in enumerate(report.moe_layer_ids)
    ]


def phase_reports(report: ReplayReport) -> dict[str, ReplayReport]:
    """Returns the report of each phase, where the windows are of several; else none."""
    found = [phase for phase in PHASES if phase in report.phases]
    return {phase: report.of_phase(phase) for phase in found} if len(found) > 1 else {}


def phase_cells(report: ReplayReport) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and cells of the phases, side by side; one row per result."""
    columns, rows = ["policy"], [[result.name] for result in report.results]
    for phase, part in phase_reports(report).items():
        columns += [f"{phase}: served", "min layer", "step time"]
        for cells, result in zip(rows, part.results, strict=True):
            row = part.summary(result)
            cells += [as_number(row["served_mean"]), as_number(row["served_min"]), as_seconds(row["step_s"])]
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
    return f"{slots} slots ({extra} more a rank{cost}) would serve at {mean:.3f}."


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
        "layers": {"policy": report.best.name, "rows": layer_rows(report)},
        "phases": {
            phase: [part.summary(result) for result in part.results] for phase, part in phase_reports(report).items()
        },
        "traffic": {
            result.name: result.traffic.tolist()
            for result in dict.fromkeys([report.floor, report.best])
            if np.isfinite(result.traffic).all()
        },
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


def as_number(value: float | None) -> str:
    """Returns a plain number of four decimals; "-" where it has no meaning."""
    return "-" if value is None else f"{value:.4f}"


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


def to_html(
    report: ReplayReport,
    title: str = "Expert balancing replay",
    sweep: dict[str, Any] | None = None,
    against: dict[str, Any] | None = None,
) -> str:
    """Returns the page. sweep: of simulator.sweep_curves;  against: of report_against.against_page"""
    return filled_page("report", "replay", title, {**page_data(report), "sweep": sweep, "against": against})


def filled_page(name: str, command: str, title: str, data: dict[str, Any]) -> str:
    """Returns a page. name: of body and script, in report_assets;  command: that makes it;  data: that it draws"""
    assets = resources.files("moe_serve.eplb.replay") / "report_assets"

    def asset(file: str) -> str:
        return (assets / file).read_text(encoding="utf-8")

    parts = {
        "css": asset("report.css"),
        "js": asset("charts.js") + asset(f"{name}.js"),
        "body": asset(f"{name}.html"),
        "command": command,
        "title": html.escape(title),
        # "<" inside a script element could end it: JSON may say it as an escape instead.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # In one pass: what a name of the user holds is no place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], asset("page.html"))


def page_data(report: ReplayReport) -> dict[str, Any]:
    """Returns what the page's script draws."""
    best = report.best
    columns, rows = _table_cells(report)
    groups = page_groups(len(report.first_steps))
    policies = []
    for index, (result, cells) in enumerate(zip(report.results, rows, strict=True)):
        role = {FLOOR: "floor", CEILING: "ceiling"}.get(result.name, "policy")
        policies.append(
            {
                "name": result.name,
                "role": role,
                "best": result is best and role == "policy",
                "color": index - 1,
                "cells": cells,
                "served_mean": _grouped(result.served.mean(axis=1), groups, np.mean),
                "served_min": _grouped(result.served.min(axis=1), groups, np.min),
                "moved_share": _grouped(result.moves / (report.num_slots * len(report.moe_layer_ids)), groups, np.max),
            }
        )
    return {
        "conditions": [[name, words] for name, words in report.conditions.items()],
        "cards": _cards(report),
        "verdict": list(verdict(report)),
        "columns": columns,
        "policies": policies,
        "missing": missing_lines(report.missing),
        "steps": [int(report.first_steps[group[0]]) for group in groups],
        "time": _time_pictures(report, best, groups),
        "heat": _heat(report),
        "changes": changes(report),
        "traffic": _traffic(report),
        "layerPolicy": best.name,
        "layerRows": [list(row.values()) for row in layer_rows(report)],
        "phases": _phase_pictures(report),
        "redundancy": [list(row) for row in report.redundancy],
        "numSlots": report.num_slots,
        "slotLabel": f"slots (physical experts per layer, {report.num_ranks} ranks)",
    }


def _table_cells(report: ReplayReport) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, and the balance and the cost of each policy in one row."""
    (names, balance), (more, costs) = balance_cells(report), cost_cells(report)
    kept = [0, 1, 3, 5]  # policy, served, min layer, fit
    rest = [i for i, name in enumerate(more) if name not in ("policy", "moves")]
    rows = [[left[i] for i in kept] + [right[i] for i in rest] for left, right in zip(balance, costs, strict=True)]
    short = {"active experts": "active", "rebalances": "times"}
    return [names[i] for i in kept] + [short.get(more[i], more[i]) for i in rest], rows


def _cards(report: ReplayReport) -> list[dict[str, str]]:
    """Returns the key numbers. A card with nothing to say is left out: no moves, nothing to compare with, no change."""
    best, floor = report.summary(report.best), report.summary(report.floor)
    compared = report.best is not report.floor
    cards = [
        {
            "label": f"served balancedness, {best['policy']}",
            "value": f"{best['served_mean']:.3f}",
            "from": f"doing nothing: {floor['served_mean']:.3f}" if compared else "",
        },
        {
            "label": "busiest rank over the mean",
            "value": f"+{1 / max(best['served_mean'], 1e-9) - 1:.0%}",
            "from": f"doing nothing: +{1 / max(floor['served_mean'], 1e-9) - 1:.0%}" if compared else "",
        },
    ]
    if best["num_rebalances"]:
        cards.append(
            {
                "label": "slots rewritten per rebalance",
                "value": as_percent(best["moved_share"]),
                "from": f"{best['num_rebalances']} rebalance{'s' * (best['num_rebalances'] > 1)}"
                + (f", {as_bytes(best['bytes'])} in all" if best["bytes"] is not None else ""),
            }
        )
    if compared and best["tokens_per_s"] and floor["tokens_per_s"]:
        cards.append(
            {
                "label": "predicted tokens/s, moves paid",
                "value": f"{best['tokens_per_s'] / floor['tokens_per_s'] - 1:+.1%}",
                "from": f"{best['tokens_per_s']:,.0f} against {floor['tokens_per_s']:,.0f}",
            }
        )
    if best["off_node"] is not None and as_percent(best["off_node"]) != as_percent(floor["off_node"]):
        cards.append(
            {
                "label": "routes that leave their node",
                "value": as_percent(best["off_node"]),
                "from": f"doing nothing: {as_percent(floor['off_node'])}",
            }
        )
    return cards


def _grouped(values: np.ndarray, groups: list[np.ndarray], reduce: Any) -> list[float | None]:
    out = [float(reduce(values[group])) for group in groups]
    return [round(value, 5) if np.isfinite(value) else None for value in out]


def _time_pictures(report: ReplayReport, best: PolicyResult, groups: list[np.ndarray]) -> dict[str, Any]:
    """Returns rank load, and the busiest rank of each layer, over time, before and after."""
    pictures: dict[str, Any] = {"span": _span(report)}
    sides = {"before": report.floor, "after": best} if best is not report.floor else {"before": best}
    for side, result in sides.items():
        load = np.stack([result.rank_load[group].mean(axis=0) for group in groups], axis=1)  # [R, columns]
        mean = load.mean(axis=0)
        relative = load / np.where(mean > 0, mean, 1)
        layers = np.stack([1 / np.maximum(result.served[group].mean(axis=0), 1e-6) for group in groups], axis=1)
        pictures[side] = {
            "name": f"{side}: {result.name}" if len(sides) > 1 else result.name,
            "ranks": load.shape[0],
            "columns": load.shape[1],
            "load": _encode((relative - 1) / (2 * pictures["span"]) + 0.5),
            "layers": _encode((layers - 1) / 2),
        }
    return pictures


def _span(report: ReplayReport) -> float:
    """Returns how far colours reach from the mean, so that "do nothing" is visible: 0.05 to 1, a round number."""
    load = report.floor.rank_load
    mean = load.mean(axis=1, keepdims=True)
    widest = float(np.quantile(np.abs(load / np.where(mean > 0, mean, 1) - 1), 0.995))
    return next((step for step in (0.05, 0.1, 0.2, 0.3, 0.5) if widest <= step), 1.0)


def _heat(report: ReplayReport) -> dict[str, Any]:
    mean = report.load.mean(axis=1, keepdims=True)
    relative = report.load / np.where(mean > 0, mean, 1)
    return {
        "layers": list(report.moe_layer_ids),
        "columns": report.load.shape[1],
        "data": _encode((np.log2(np.maximum(relative, 2.0**-6)) + 3) / 6),
    }


def _phase_pictures(report: ReplayReport) -> dict[str, Any] | None:
    """Returns the table of the phases, and the balancedness of each policy over the windows of each."""
    parts = phase_reports(report)
    if not parts:
        return None
    columns, rows = phase_cells(report)
    lines = []
    for phase, part in parts.items():
        groups = page_groups(len(part.first_steps))
        served = {result.name: _grouped(result.served.mean(axis=1), groups, np.mean) for result in part.results[:-1]}
        lines.append({"name": phase, "steps": [int(part.first_steps[group[0]]) for group in groups], "served": served})
    return {"columns": columns, "rows": rows, "lines": lines}


def _traffic(report: ReplayReport) -> dict[str, Any] | None:
    """Returns the shares of all routes before and after: from rank to rank as bytes, from node to node as numbers.

    ranks: name, [R, R] as 16-bit integers, lowest byte first, of the largest share of both, and that share
    nodes: name, [N, N]; () on one node
    """
    results = list(dict.fromkeys([report.floor, report.best]))
    totals = [result.traffic.sum() for result in results]
    if not all(np.isfinite(total) and total > 0 for total in totals):
        return None
    shares = [result.traffic / total for result, total in zip(results, totals, strict=True)]
    most, nodes = max(float(share.max()) for share in shares), report.num_nodes
    by_node = [share.reshape(nodes, -1, nodes, report.num_ranks // nodes).sum(axis=(1, 3)) for share in shares]
    named = [result.name for result in results]
    return {
        "numRanks": report.num_ranks,
        "most": most,
        "ranks": [
            [name, _packed(np.rint(share / most * 65535).astype("<u2"))]
            for name, share in zip(named, shares, strict=True)
        ],
        "nodes": [[name, np.round(share, 6).tolist()] for name, share in zip(named, by_node, strict=True)]
        if nodes > 1
        else [],
    }


def _encode(shares: np.ndarray) -> str:
    """Returns values 0..1 as bytes 0..255 in base64, clipped, row by row."""
    return _packed(np.clip(np.rint(shares * 255), 0, 255).astype(np.uint8))


def page_groups(num_windows: int) -> list[NDArray[np.int64]]:
    """Returns the windows that each column of a page averages, in order; at most 600 columns, none without windows."""
    return np.array_split(np.arange(num_windows), min(num_windows, _MAX_COLUMNS)) if num_windows else []


def _packed(table: NDArray[np.generic]) -> str:
    """Returns the bytes of an array in base64, row by row."""
    return base64.b64encode(np.ascontiguousarray(table).tobytes()).decode()


def changes(report: ReplayReport) -> dict[str, Any] | None:
    """Returns what a page shows of the changes; None where the best policy moved no expert.

    before, after: replicas of each expert at the start and at the end, [L, E] as bytes 0..255
    received:      how often a rank had to receive the expert, [L, E] as 16-bit integers, lowest byte first
    layers:        for each layer: served balancedness doing nothing, the same with the policy, experts received
    """
    best, start = report.best, report.floor.final
    if not best.moves.any() or best.final is None or start is None:
        return None
    layers = (report.floor.served.mean(axis=0), best.served.mean(axis=0), best.received.sum(axis=1))
    return {
        "name": best.name,
        "before": _packed(np.minimum(start.replica_count, 255).astype(np.uint8)),
        "after": _packed(np.minimum(best.final.replica_count, 255).astype(np.uint8)),
        "received": _packed(np.minimum(best.received, 65535).astype("<u2")),
        "most": int(best.received.max()),
        "layers": [
            [round(float(was), 5), round(float(now), 5), int(moves)] for was, now, moves in zip(*layers, strict=True)
        ],
        "expertBytes": report.expert_bytes,
        "words": change_words(report),
    }


def change_words(report: ReplayReport) -> str:
    """Returns a sentence on the cost and the gain of the best policy's moves."""
    best, row = report.best, report.summary(report.best)
    counts = best.received.sum(axis=1)
    most = int(counts.argmax())
    size = "" if row["bytes"] is None else f" ({as_bytes(row['bytes'])})"
    text = (
        f"{best.name} moved experts before {row['num_rebalances']} of {row['windows']} windows: ranks received "
        f"{row['moves']:,} experts{size} in all, most in layer {report.moe_layer_ids[most]} ({counts[most]:,}). "
        f"{np.count_nonzero(best.received):,} of {best.received.size:,} experts moved at all."
    )
    saved = (report.step_seconds(report.floor) - report.step_seconds(best)) / report.utilisation
    if np.isfinite(saved) and row["stall_s"] is not None:
        net = saved - row["stall_s"]
        text += (
            f" Predicted: steps take {as_seconds(abs(saved))} {'less' if saved >= 0 else 'more'} than doing nothing, "
            f"serving stops for {as_seconds(row['stall_s'])} to move: {as_seconds(abs(net))} "
            f"{'gained' if net >= 0 else 'lost'}."
        )
    return text
