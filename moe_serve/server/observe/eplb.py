"""The routes of the balancer: status, a plan now, the placement in use, a placement of the caller. Torch-free."""

import time
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import Answer, Rebalance, SetPlacement
from moe_serve.errors import RequestError
from moe_serve.server.edge.body import Bodies
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.observe.balance_json import status_json, what_to_set
from moe_serve.server.observe.placement_body import PlacementShape, parse_placement, placement_json
from moe_serve.server.ranks.bridge import Bridge
from moe_serve.server.requests.open_request import UnavailableError


def add_eplb(app: FastAPI, config: ServeConfig, bridge: Bridge, bodies: Bodies) -> None:
    """Adds /eplb/status, /eplb/rebalance and /eplb/placement."""

    @app.get("/eplb/status")
    async def status() -> Response:
        """What the balancer does and why: placement, decisions, moves, totals."""
        return _json(status_json(bridge.balance, time.time()))

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
        return _json(placement_json(rows, bridge.balance.version, placement_shape(bridge)))

    @app.post("/eplb/placement", tags=[ADMIN])
    async def set_placement(request: Request) -> Response:
        """Moves experts to these slots, in rounds, while serving. Refused with the reasons where it does not fit."""
        _refuse_unless_dynamic(config)
        shape = placement_shape(bridge)
        async with bodies.read(request, shape.max_bytes) as body:
            rows = parse_placement(body, shape)
        return _answer(await bridge.command(SetPlacement(0, rows)))


def placement_shape(bridge: Bridge) -> PlacementShape:
    """Returns what a placement must fit, as the ranks have reported. Raises UnavailableError while they start."""
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
    """What the leader did; 400 with its reasons where it refuses."""
    if not answer.ok:
        raise RequestError(answer.text)
    return _json({"ok": True, "message": answer.text, "facts": answer.facts})


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
