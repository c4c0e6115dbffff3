"""The balancer as JSON, for /eplb/status, /health and the dashboard. Pure functions."""

from typing import Any

from moe_serve.server.ranks.balance import BalanceBook, Event, Move, summary_of

_NUM_RECENT = 20  # decisions and moves in a status


def status_json(book: BalanceBook, now_s: float) -> dict[str, Any]:
    """Returns what /eplb/status answers. Times are seconds; ages are None where nothing has been reported yet.

    gain: seconds, predicted and realised, of all moves in the windows in which they were measured
    """
    recent = [event_json(event) for event in book.events if event.kind in book.decisions]
    move = book.moves.running
    return {
        **summary_json(book, now_s),
        "note": what_to_set(book.mode),
        "step": book.step,
        "leader": None if book.leader is None else book.leader[1],
        "placement": {"version": book.version, "age_s": _age(book.version_since_s, now_s)},
        "last_decision": None if book.last_decision is None else event_json(book.last_decision),
        "gain": {name: book.totals.get(f"{name}_gain_seconds", 0.0) for name in ("predicted", "realised")},
        "move": None if move is None else move_json(move),
        "moves": [move_json(move) for move in book.moves][: -_NUM_RECENT - 1 : -1],
        "splits": book.splits,
        "window": window_json(book),
        "decisions": recent[: -_NUM_RECENT - 1 : -1],
        "totals": book.totals,
    }


def summary_json(book: BalanceBook, now_s: float) -> dict[str, Any]:
    """Returns what the balancer does, and whether it works: progress is a window, a decision or a new placement."""
    return {
        "mode": book.mode,
        "state": book.state,
        "alarm": book.alarm or None,
        "report_age_s": _age(book.heard_s, now_s),
        "progress_age_s": _age(book.progress_s, now_s),
    }


def what_to_set(mode: str) -> str | None:
    """Returns which setting makes the server balance its experts; None where it does."""
    match mode:
        case "off":
            return (
                "eplb.mode is off: load is not recorded and experts stay where they are; "
                "set eplb.mode to static to see the load, to dynamic to balance it"
            )
        case "static":
            return "eplb.mode is static: experts stay where they are; set eplb.mode to dynamic to let them move"
        case _:
            return None


def event_json(event: Event) -> dict[str, Any]:
    """Returns a decision or another event. at_s: seconds since 1970; gain and cost as predicted, over the horizon.

    realised_gain_s: of "watch", what the last move has gained; predicted_gain_s is then what it had promised for the
    same windows. None for all others.
    """
    return {
        "at_s": round(event.at_s, 3),
        "step": event.step,
        "kind": event.kind,
        "reason": event.text,
        "num_layers": event.num_layers,
        "predicted_gain_s": event.gain_s,
        "predicted_cost_s": event.cost_s,
        "realised_gain_s": event.realised_s if event.kind == "watch" else None,
    }


def move_json(move: Move) -> dict[str, Any]:
    """Returns a move and what it brought. Realised values are None until windows have closed after it."""
    return {
        "began_s": round(move.decision.at_s, 3),
        "ended_s": None if move.ended_s is None else round(move.ended_s, 3),
        "state": "moving" if move.ended_s is None else "failed" if move.failed else "live",
        "summary": move.summary,
        "version": move.version,
        "num_layers": move.decision.num_layers,
        "num_experts": move.num_experts,
        "num_rounds": move.num_rounds,
        "num_bytes": move.num_bytes,
        "predicted_gain_s": move.decision.gain_s,
        "predicted_cost_s": move.decision.cost_s,
        "balancedness_before": move.before,
        "balancedness_after": move.after,
        "step_time_before_s": move.step_before_s,
        "step_time_after_s": move.step_after_s,
    }


def window_json(book: BalanceBook) -> dict[str, Any] | None:
    """Returns the newest window without its counts; None: no window has closed yet."""
    window = book.window
    if window is None:
        return None
    summary = summary_of(window.balancedness) if window.balancedness else (None, None, None)
    return {
        "first_step": window.first_step,
        "num_steps": window.num_steps,
        "phase": window.phase,
        "step_time_s": window.step_time_s,
        "balancedness": dict(zip(("min", "p50", "mean"), summary, strict=True)),
    }


def _age(since_s: float | None, now_s: float) -> float | None:
    return None if since_s is None else round(max(now_s - since_s, 0.0), 3)
