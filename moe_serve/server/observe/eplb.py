"""The balancer over HTTP: its state as JSON, its placement, a rebalance, and a recording of the load.

The parser checks types and sizes of a placement before a rank sees it; the balancer says whether it is legal.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from msgspec import Meta

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Answer, Rebalance, RecordCommand, SetPlacement
from moe_serve.errors import RequestError
from moe_serve.server.edge.body import Bodies, Body, Count, Name, read_body, show
from moe_serve.server.edge.errors import error_json, json_response
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.ranks.balance import BalanceBook, Event, Move, summary_of
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import UnavailableError


def add_eplb(app: FastAPI, config: ServeConfig, bridge: Bridge, bodies: Bodies) -> None:
    """Adds /eplb/status, /eplb/rebalance and /eplb/placement."""

    @app.get("/eplb/status")
    async def status() -> Response:
        """The state of the balancer: placement, decisions with their reasons, moves, totals."""
        return json_response(status_json(bridge.balance, time.time()))

    @app.post("/eplb/rebalance", tags=[ADMIN])
    async def rebalance() -> Response:
        """Plans now, without waiting for the next window; moves if that pays."""
        _refuse_unless_dynamic(config)
        return _answer(await bridge.command(Rebalance(0)))

    @app.get("/eplb/placement")
    async def placement() -> Response:
        """The placement in use, as a file that `eplb.init_expert_location` reads."""
        if config.eplb.mode == "off":
            raise RequestError(what_to_set("off") or "")
        rows = bridge.balance.placement
        if rows is None:
            raise UnavailableError("no rank has reported its placement yet; try again in a moment")
        return json_response(placement_json(rows, bridge.balance.version, placement_shape(bridge)))

    @app.post("/eplb/placement", tags=[ADMIN])
    async def set_placement(request: Request) -> Response:
        """Moves experts to these slots, in rounds, while serving. Refused with the reasons where it does not fit."""
        _refuse_unless_dynamic(config)
        shape = placement_shape(bridge)
        async with bodies.read(request, shape.max_bytes) as body:
            rows = parse_placement(body, shape)
        return _answer(await bridge.command(SetPlacement(0, rows)))


def placement_shape(bridge: Bridge) -> "PlacementShape":
    """Returns the shape of placements, as reported by the ranks. Raises UnavailableError while they start."""
    info = bridge.workers.info
    if not info:
        raise UnavailableError(bridge.problem() or "the ranks are starting")
    return PlacementShape(
        num_ranks=bridge.workers.num_ranks,
        num_logical=info["num_logical"],
        num_slots=info["num_slots"],
        moe_layer_ids=tuple(info["moe_layer_ids"]),
    )


def _refuse_unless_dynamic(config: ServeConfig) -> None:
    reason = what_to_set(config.eplb.mode)
    if reason is not None:
        raise RequestError(f"{reason}; then start the server again")


def _answer(answer: Answer) -> Response:
    """Returns what the leader did. Raises RequestError with its reasons if it refuses."""
    if not answer.ok:
        raise RequestError(answer.text)
    return json_response({"ok": True, "message": answer.text, "facts": answer.facts})


PLACEMENT_FORMAT = "moe_serve.placement"  # of eplb/files/placements.py, which reads what is written here
_MAP = "physical_to_logical_map"


@dataclass(frozen=True)
class PlacementShape:
    """The shape of a placement. moe_layer_ids: of the model, one for each row"""

    num_ranks: int
    num_logical: int
    num_slots: int
    moe_layer_ids: tuple[int, ...]

    @property
    def max_bytes(self) -> int:
        """A bound on bodies with a placement of this shape, including rows of dense layers and indents."""
        return 2**16 + 32 * self.num_slots * (1 + max(self.moe_layer_ids, default=0))


def placement_json(rows: list[list[int]], version: int, shape: PlacementShape) -> dict[str, Any]:
    """Returns our placement file, which `eplb.init_expert_location` reads and `POST /eplb/placement` takes."""
    return {
        "format": PLACEMENT_FORMAT,
        "num_logical": shape.num_logical,
        "num_ranks": shape.num_ranks,
        "moe_layer_ids": list(shape.moe_layer_ids),
        "version": version,
        _MAP: rows,
    }


_Rows = Annotated[
    list[list[int] | str | None],  # of a dense layer anything, since it is left out
    Meta(
        description="one list of experts for each MoE layer",
        extra={"noun": "list of experts for each MoE layer", "missing": "send one list of experts for each MoE layer"},
    ),
]


class PlacementBody(Body, kw_only=True):
    """Our placement file, as GET gives it, or its map alone. Other fields must agree with what is served."""

    other_words: ClassVar[Mapping[str, str]] = {"placement": _MAP, "map": _MAP}
    example: ClassVar[Mapping[str, Any]] = {_MAP: [[0, 1, 2, 3], [3, 2, 1, 0]]}

    physical_to_logical_map: _Rows
    version: Count | None = None  # the ranks count versions themselves
    format: Name | None = None
    num_logical: Count | None = None
    num_ranks: Count | None = None
    moe_layer_ids: list[int] | None = None


def parse_placement(body: bytes, shape: PlacementShape) -> list[list[int]]:
    """Returns [layers][slots] of a body: our placement file, {"physical_to_logical_map": rows}, or the bare rows.

    Rows for every layer of the model, dense ones included, are taken too, as SGLang writes them. Raises RequestError.
    """
    if body.lstrip().startswith(b"["):
        given = PlacementBody(physical_to_logical_map=read_body(body, _Rows, _MAP))
    else:
        given = read_body(body, PlacementBody)
    for name, expected in (
        ("format", PLACEMENT_FORMAT),
        ("num_logical", shape.num_logical),
        ("num_ranks", shape.num_ranks),
        ("moe_layer_ids", list(shape.moe_layer_ids)),
    ):
        value = getattr(given, name)
        if value not in (None, expected):
            raise RequestError(f"{name} is {show(value)}, expected {expected}, as is served here", field=name)
    rows, num_layers = given.physical_to_logical_map, len(shape.moe_layer_ids)
    if len(rows) != num_layers:
        if len(rows) <= max(shape.moe_layer_ids, default=-1):
            raise RequestError(
                f"{_MAP} has {len(rows)} rows, expected {num_layers}, one for each MoE layer of the model", field=_MAP
            )
        rows = [rows[layer] for layer in shape.moe_layer_ids]
    return [_row(f"{_MAP}[{i}]", row, shape) for i, row in enumerate(rows)]


def _row(name: str, experts: Any, shape: PlacementShape) -> list[int]:
    if not isinstance(experts, list):
        raise RequestError(f"{name} is {show(experts)}, expected a list of whole numbers", field=name)
    if len(experts) != shape.num_slots:
        raise RequestError(f"{name} has {len(experts)} slots, expected {shape.num_slots}", field=name)
    wrong = next((i for i, expert in enumerate(experts) if not -1 <= expert < shape.num_logical), None)
    if wrong is not None:
        raise RequestError(
            f"{name}[{wrong}] is {show(experts[wrong])}, expected an expert from 0 to {shape.num_logical - 1}, or -1 "
            "for an empty slot",
            field=f"{name}[{wrong}]",
        )
    return experts


def add_recorder(app: FastAPI, config: ServeConfig, bridge: Bridge) -> None:
    """Adds `/{start,stop,dump}_expert_distribution_record`. Answers are SGLang's plain text, then details and files.

    GET and POST do the same, as in SGLang.
    """

    async def run(command: str, done: str) -> Response:
        if config.eplb.mode == "off":
            raise RequestError(
                "eplb.mode is off, so expert load is not recorded; start the server with eplb.mode=static"
            )
        answer = await bridge.command(RecordCommand(0, command))
        if not answer.ok:
            return error_json(409, answer.text)
        lines = [done, answer.text, *answer.facts.get("files", [])]
        return Response("".join(f"{line}\n" for line in lines), media_type="text/plain")

    @app.get("/start_expert_distribution_record", tags=[ADMIN])
    @app.post("/start_expert_distribution_record", tags=[ADMIN])
    async def start() -> Response:
        """Begins a recording, and drops a running one."""
        return await run("start", "Start recording expert distribution.")

    @app.get("/stop_expert_distribution_record", tags=[ADMIN])
    @app.post("/stop_expert_distribution_record", tags=[ADMIN])
    async def stop() -> Response:
        """Ends the recording, which is kept for a dump."""
        return await run("stop", "Stop recording expert distribution.")

    @app.get("/dump_expert_distribution_record", tags=[ADMIN])
    @app.post("/dump_expert_distribution_record", tags=[ADMIN])
    async def dump() -> Response:
        """Writes what was recorded since the start or the last dump; the answer names the files."""
        return await run("dump", "Dump expert distribution record.")


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
    """Returns the balancer's state. progress_age_s: since a window, a decision or a new placement"""
    return {
        "mode": book.mode,
        "state": book.state,
        "alarm": book.alarm or None,
        "report_age_s": _age(book.heard_s, now_s),
        "progress_age_s": _age(book.progress_s, now_s),
    }


def what_to_set(mode: str) -> str | None:
    """Returns which setting makes the server balance its experts; None if it does."""
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
    """Returns a decision or another event. at_s: seconds since 1970; gain and cost: predicted over the horizon

    realised_gain_s: of "watch", the gain of the last move; predicted_gain_s is then its promise for the same windows.
    None for all others.
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
    """Returns a move and its effect. Realised values are None until windows have closed after it."""
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
