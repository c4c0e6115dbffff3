"""The live page of the balancer: its files, and the data that it fetches every second.

The page loads nothing from other servers, and its Content-Security-Policy allows nothing else.
"""

import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from fastapi import FastAPI, Request, Response

from moe_serve.config import ServeConfig, served_name
from moe_serve.engine.protocol.messages import Status
from moe_serve.errors import RequestError
from moe_serve.server.edge.errors import json_response
from moe_serve.server.edge.pages import PAGE_HEADERS, add_pages
from moe_serve.server.observe.eplb import event_json, move_json, status_json
from moe_serve.server.ranks.balance import BalanceBook
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.ranks.rank_table import RankTable, RankView
from moe_serve.server.requests.request_stats import RequestStats

_FILES = {
    "/dashboard": "page.html",
    "/dashboard/page.css": "page.css",
    "/dashboard/charts.js": "charts.js",
    "/dashboard/page.js": "page.js",
}
_PAGES = "num_pages_"  # begins the names of counters


def add_dashboard(app: FastAPI, config: ServeConfig, bridge: Bridge) -> None:
    """Adds /dashboard and what it loads."""
    start = uuid.uuid4().hex
    add_pages(app, _FILES)

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        """What is new since the windows, events and placement that the query names."""
        seen = Seen.from_query(request.query_params)
        prefill = None if bridge.prefill is None else bridge.prefill.workers
        groups = [bridge.workers, *([] if prefill is None else [prefill])]
        system = {
            "model": served_name(config.model),
            "state": bridge.problem() or "ready",
            "requests": {"open": len(bridge.book), **bridge.book.counters},
            "handover": None if bridge.prefill is None else handover_json(bridge.book.stats, bridge.book.routes),
            "pages": pages_json([view.status for group in groups for view in group if view.status is not None]),
            "drafts": drafts_json([view.status for view in bridge.workers if view.status is not None]),
        }
        answer = page_data(bridge.workers, bridge.balance, system, start, seen, time.time(), prefill)
        return json_response(answer, headers=PAGE_HEADERS)


def handover_json(stats: RequestStats, routes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the mean time of each part of a hand-over in ms, how many there were, and where requests began."""
    num = sum(stats.handover_s["waiting"].counts)
    parts = {part: round(1e3 * each.total / max(1, num), 3) for part, each in stats.handover_s.items()}
    return {"num": num, "parts_ms": parts, "routes": routes}


def pages_json(told: Sequence[Status]) -> dict[str, int] | None:
    """Returns what has become of pages outside the KV caches of all ranks, by fate; None: no rank has any."""
    totals: Counter[str] = Counter()
    for status in told:
        of_pages = {key: int(count) for key, count in status.counters.items() if key.startswith(_PAGES)}
        totals.update({key.removeprefix(_PAGES): count for key, count in of_pages.items()})
    return dict(totals) or None


_SAVED = "speculation_saved_seconds"


def drafts_json(told: Sequence[Status]) -> dict[str, Any] | None:
    """Returns what drafts of tokens have done on all ranks since the start; None: no rank looks for any.

    sources:          [right, verified] by source
    tokens_per_step:  of a request, in decode steps
    experts_per_token: that rows of steps with drafts asked for, and of steps without; None: not known
    saved_s:          time of ranks; None: not known
    """
    totals: Counter[str] = Counter()
    for status in told:
        totals.update(status.counters)
    if "num_draft_proposals" not in totals:
        return None
    of_drafts = [key.split("_") for key in totals if key.startswith("num_drafts_")]
    right = {source: totals[f"num_drafts_{source}_right"] for *_, source, outcome in of_drafts if outcome == "right"}
    verified = {source: number + totals[f"num_drafts_{source}_wrong"] for source, number in right.items()}
    of_decodes = {
        kind: {name: totals[f"num_decodes_{kind}_{name}"] for name in ("requests", "tokens", "experts")}
        for kind in ("with_drafts", "without")
    }
    tokens, requests = (sum(each[name] for each in of_decodes.values()) for name in ("tokens", "requests"))
    return {
        "sources": {source: [right[source], number] for source, number in verified.items() if number},
        "tokens_per_step": round(tokens / requests, 3) if requests else None,
        "experts_per_token": {
            kind: round(each["experts"] / each["tokens"], 2) if each["experts"] and each["tokens"] else None
            for kind, each in of_decodes.items()
        },
        "saved_s": round(totals[_SAVED], 3) if _SAVED in totals else None,
    }


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Seen:
    """How many windows, events and placements of this start of the front end a page has already.

    start: identifies one start of the front end; a page of another start has nothing
    """

    start: str = ""
    windows: int = 0
    events: int = 0
    placements: int = 0

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Self:
        """Raises RequestError for a malformed number; ignores other keys."""
        numbers = {}
        for name in ("windows", "events", "placements"):
            text = query.get(name, "0")
            if not (text.isascii() and text.isdigit()) or len(text) > 15:
                raise RequestError(f"{name} is {text[:60]!r}, expected a whole number", field=name)
            numbers[name] = int(text)
        return cls(start=query.get("start", ""), **numbers)


def page_data(
    workers: RankTable,
    book: BalanceBook,
    system: Mapping[str, Any],
    start: str,
    seen: Seen,
    now_s: float,
    prefill: RankTable | None,
) -> dict[str, Any]:
    """Returns what is new for a page. system: name of the model, state, requests, passed on as they are

    prefill: ranks that are shown behind the others;  None: there are none
    points, events: those that the page has not seen;  load: of the newest window, None = the page has it;  phases: the
    tokens of the newest window of each phase, [layers][experts], those that the page has not seen;
    placement: None = the page has it, or none is known
    """
    if seen.start != start:
        seen = Seen()
    ranks = [_rank(view, workers) for view in workers]
    if prefill is not None:
        ranks += [_rank(view, prefill) | {"rank": f"prefill {view.rank}"} for view in prefill]
    is_new = book.window is not None and seen.windows != book.num_windows
    return {
        "start": start,
        "now_s": round(now_s, 3),
        "system": system,
        "balancer": status_json(book, now_s),
        "ranks": ranks,
        "num_windows": book.num_windows,
        "num_events": book.num_events,
        "num_placements": book.num_placements,
        "points": [
            [round(point.at_s, 3), point.first_step, point.num_steps, point.phase, point.step_time_s]
            + [_short(value) for value in (point.lowest, point.middle, point.mean)]
            for point in _newest(book.points, book.num_windows - seen.windows)
        ],
        "events": [event_json(event) for event in _newest(book.events, book.num_events - seen.events)],
        "moves": [move_json(move) for move in book.moves],
        "load": _load(workers, book) if is_new else None,
        "phases": {phase: window.tokens for phase, (number, window) in book.newest.items() if number > seen.windows},
        "placement": book.placement if book.num_placements != seen.placements else None,
    }


def _load(workers: RankTable, book: BalanceBook) -> dict[str, Any]:
    window = book.window
    assert window is not None
    ids = workers.info.get("moe_layer_ids", [])
    return {
        "layers": ids if len(ids) == len(window.tokens) else list(range(len(window.tokens))),
        "tokens": window.tokens,
        "ranks": [[round(load, 1) for load in loads] for loads in window.rank_load],
        "balancedness": [_short(value) for value in window.balancedness],
        "traffic": _whole(window.traffic),
        "traffic_before": _whole(book.traffic_before),
    }


def _whole(rows: list[list[float]]) -> list[list[int]]:
    return [[round(value) for value in row] for row in rows]


def _rank(view: RankView, workers: RankTable) -> dict[str, Any]:
    status = view.status
    rank: dict[str, Any] = {
        "rank": view.rank,
        "host": view.host,
        "state": view.mask_reason or ("serving" if view.serves and workers.loss is None else view.phase),
        "serves": view.serves and workers.loss is None,
    }
    if status is not None:
        rank |= {
            "running": status.num_running,
            "waiting": status.num_waiting,
            "free_blocks": status.num_free_blocks,
            "blocks": status.num_blocks,
            "steps": status.counters.get("num_steps", 0),
            "output_tokens": status.counters.get("num_output_tokens", 0),
            "prompt_tokens": status.counters.get("num_prompt_tokens", 0),
            "cached_tokens": status.counters.get("num_cached_prompt_tokens", 0),
        }
    return rank


def _newest(items: deque[_Item], number: int) -> Sequence[_Item]:
    """Returns the newest items, oldest first, as far as they are kept."""
    return list(items)[-number:] if number > 0 else []


def _short(value: float) -> float:
    return round(value, 4)
