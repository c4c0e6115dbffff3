"""A replay as one self-contained HTML page: the numbers as JSON, and a small script that draws them.

The page asks nothing of a network. Big tables travel as bytes, 0..255: rank load over mean - span .. mean + span, the
busiest rank of a layer over 1..3 times the mean, expert load as log2 of load over mean, -3..+3.
"""

import base64
import html
import json
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.replay.report import (
    as_bytes,
    as_percent,
    as_seconds,
    balance_cells,
    cost_cells,
    missing_lines,
    verdict,
)
from moe_serve.eplb.replay.result import CEILING, FLOOR, PolicyResult, ReplayReport

_MAX_COLUMNS = 600  # of a picture or line over windows


def to_html(
    report: ReplayReport,
    title: str = "Expert balancing replay",
    sweep: dict[str, Any] | None = None,
    against: dict[str, Any] | None = None,
) -> str:
    """Returns the page. sweep: of report_sweep.sweep_curves;  against: of report_against.against_page"""
    assets = resources.files("moe_serve.eplb.replay") / "report_assets"
    # "<" inside a script element could end it: JSON may say it as an escape instead.
    content = {**page_data(report), "sweep": sweep, "against": against}
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (assets / "report.html").read_text(encoding="utf-8")
    parts = {
        "css": (assets / "report.css").read_text(encoding="utf-8"),
        "js": "".join((assets / name).read_text(encoding="utf-8") for name in ("charts.js", "report.js")),
        "title": html.escape(title),
        "data": data,
    }
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


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


def _traffic(report: ReplayReport) -> list[list[Any]] | None:
    pictures = []
    for result in dict.fromkeys([report.floor, report.best]):
        total = result.traffic.sum()
        if not np.isfinite(total) or total <= 0:
            return None
        pictures.append([result.name, np.round(result.traffic / total, 6).tolist()])
    return pictures


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
    """Returns what the moves of the best policy cost, and what they brought."""
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
