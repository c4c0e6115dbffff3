"""The page of an advice: one self-contained HTML file, its JSON report and a small script that draws it."""

from pathlib import Path
from typing import Any

from moe_serve.eplb.replay.advise import (
    ENOUGH,
    LEAST_BLOCKS,
    RESAMPLES,
    UNFIT,
    Advice,
    advice_cells,
    advice_to_json,
    as_price,
)
from moe_serve.eplb.replay.report import as_bytes, filled_page


def advice_to_html(advice: Advice, trace: str, model: str) -> str:
    """Returns the page. trace, model: as they are to stand in commands"""
    found = advice_to_json(advice, trace, model)
    data = found | {
        "conditions": [[name, words] for name, words in advice.conditions.items()],
        "cards": _cards(advice, found),
        **_table(advice, found),
        "missing": [UNFIT] if not all(choice.fits for choice in advice.choices) else [],
    }
    return filled_page("advice", "advise", f"Advice for {Path(trace).name}", data)


def _table(advice: Advice, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the terminal's table, the columns to choose by first, with intervals and with what the KV cache loses."""
    names, rows = advice_cells(advice)
    rows = [
        [*cells, _between(row), f"{row['kv_tokens_lost']:,}" if row["kv_tokens_lost"] else "-"]
        for cells, row in zip(rows, found["choices"], strict=True)
    ]
    names += ["90 %", "KV lost"]
    first = [
        "redundant",
        "policy",
        "every",
        "served",
        "90 %",
        "tokens/s/rank",
        "per request",
        "price/M",
        "memory",
        "KV lost",
    ]
    order = [names.index(name) for name in first if name in names]
    order += [i for i in range(len(names)) if i not in order]
    return {
        "columns": [names[i] for i in order],
        "rows": [[cells[i] for i in order] for cells in rows],
        "kinds": [
            "advised" if each is advice.advised else "floor" if each is advice.baseline or not each.fits else ""
            for each in advice.choices
        ],
    }


def _between(row: dict[str, Any]) -> str:
    return "-" if row["served_low"] is None else f"{row['served_low']:.3f} to {row['served_high']:.3f}"


def _cards(advice: Advice, found: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the key numbers of what is advised."""
    best, base = found["advised"], found["choices"][0]
    gain = found["gain"]
    compared = advice.advised is not advice.baseline
    interval = "" if best["served_low"] is None else f"90 %: {_between(best)}"
    against = f"in order: {base['served_mean']:.3f}" if compared else ""
    cards = [
        {
            "label": "redundant experts per layer",
            "value": f"{best['num_redundant']}",
            "from": f"{best['num_slots']} slots, {best['num_slots'] // advice.num_ranks} a rank",
        },
        {
            "label": "balancedness served",
            "value": f"{best['served_mean']:.3f}",
            "from": "; ".join(filter(None, (interval, against))),
        },
    ]
    if compared:
        cards.append(
            {
                "label": "tokens/s over experts in order",
                "value": f"{gain['mean']:+.1%}",
                "from": "" if gain["low"] is None else f"90 %: {gain['low']:+.1%} to {gain['high']:+.1%}",
            }
        )
    if best["redundant_bytes"]:
        cards.append(
            {
                "label": "memory of each rank",
                "value": f"+{as_bytes(best['redundant_bytes'])}",
                "from": f"{best['kv_tokens_lost']:,} KV tokens lost",
            }
        )
    if best["price_per_million_tokens"] is not None:
        cards.append(
            {
                "label": "price of a million tokens",
                "value": as_price(best["price_per_million_tokens"]),
                "from": f"in order: {as_price(base['price_per_million_tokens'])}" if compared else "",
            }
        )
    cards.append(
        {
            "label": "are these windows enough?",
            "value": "n/a" if advice.confidence is None else "yes" if advice.confidence >= ENOUGH else "no",
            "from": f"{advice.num_blocks} blocks of windows, {LEAST_BLOCKS} are needed"
            if advice.confidence is None
            else f"near the best in {advice.confidence:.0%} of {RESAMPLES:,} resamples",
        }
    )
    return cards
