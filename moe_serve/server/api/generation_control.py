"""Routes that hold, go on with, and end generation, and empty the prefix caches, in SGLang's forms.

`/pause_generation` takes all requests from the ranks. With mode `retract` they wait, with the output so far, and go on
with the same tokens after `/continue_generation`; with mode `abort`, SGLang's default, they end with what they have.
"""

from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.errors import RequestError
from moe_serve.server.edge.body import Bodies
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.edge.json_fields import Fields, boolean, parse_object, short_name, show
from moe_serve.server.ranks.bridge import Bridge

_MODES = ("abort", "retract")


def add_generation_control(app: FastAPI, bridge: Bridge, bodies: Bodies) -> None:
    """Adds /pause_generation (/pause), /continue_generation (/resume), /abort_request and /flush_cache."""

    @app.post("/pause_generation", tags=[ADMIN])
    @app.post("/pause", tags=[ADMIN])
    async def pause(request: Request) -> Response:
        """Sends nothing to the ranks any more, and takes back what they run. New requests wait."""
        async with bodies.read(request) as body:
            fields = _fields(body)
        mode = fields.take("mode", _mode) or "abort"
        fields.refuse_the_rest()
        await bridge.api_servers.pause(abort=mode == "abort")
        return _json({"status": "ok", "message": "Generation paused successfully."})

    @app.post("/continue_generation", tags=[ADMIN])
    @app.post("/resume", tags=[ADMIN])
    async def resume() -> Response:
        """Sends requests to the ranks again."""
        await bridge.api_servers.resume()
        return _json({"status": "ok", "message": "Generation continued successfully."})

    @app.post("/abort_request", tags=[ADMIN])
    async def abort(request: Request) -> Response:
        """Ends the requests with this rid, or all: with finish_reason abort and the output so far, if there is any."""
        async with bodies.read(request) as body:
            fields = _fields(body)
        rid, abort_all = fields.take("rid", short_name), fields.take("abort_all", boolean)
        fields.refuse_the_rest()
        if rid is None and not abort_all:
            raise RequestError("abort_request needs rid, or abort_all: true", field="rid")
        await bridge.api_servers.cut_short(None if abort_all else rid)
        return Response(status_code=200)

    @app.get("/flush_cache", tags=[ADMIN])
    @app.post("/flush_cache", tags=[ADMIN])
    async def flush_cache() -> Response:
        """Empties the prefix cache of every rank that takes part; 400 while requests are open, as in SGLang."""
        answers = await bridge.flush_cache()
        refusals = [f"rank {answer.rank}: {answer.text}" for answer in answers if not answer.ok]
        if refusals:
            raise RequestError("; ".join(refusals))
        flushed = ", ".join(f"{answer.text} of rank {answer.rank}" for answer in answers)
        masked = "".join(f"; rank {rank} is masked and keeps its own" for rank in bridge.workers.masked)
        return Response(f"Cache flushed.\n{flushed}{masked}\n", media_type="text/plain")


def _fields(body: bytes) -> Fields:
    return Fields(parse_object(body) if body.strip() else {}, "", {"abort_message": ()}, {})


def _mode(name: str, value: Any) -> str:
    if value not in _MODES:
        raise RequestError(
            f"{name} is {show(value)}, expected {' or '.join(_MODES)}; in_place is not supported: with retract, "
            "requests go on with the same tokens too",
            field=name,
        )
    return str(value)


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")
