"""What the best policy changed, expert by expert and layer by layer, what that gained and what it cost."""

from typing import Any

import numpy as np

from moe_serve.eplb.replay.report_packing import packed
from moe_serve.eplb.replay.report_units import as_bytes, as_seconds
from moe_serve.eplb.replay.result import ReplayReport


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
        "before": packed(np.minimum(start.replica_count, 255).astype(np.uint8)),
        "after": packed(np.minimum(best.final.replica_count, 255).astype(np.uint8)),
        "received": packed(np.minimum(best.received, 65535).astype("<u2")),
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
