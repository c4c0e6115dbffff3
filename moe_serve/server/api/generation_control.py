"""Routes that pause, continue and abort generation, and empty the prefix caches, in SGLang's forms.

`/pause_generation` takes all requests from the ranks. With mode `retract` they keep their output, wait, and go on with
the same tokens after `/continue_generation`. With mode `abort`, SGLang's default, they end with what they have.
"""

from typing import Annotated, Literal

from fastapi import FastAPI, Request, Response
from msgspec import Meta

from moe_serve.errors import RequestError
from moe_serve.server.edge.body import Bodies, Body, Name, read_body
from moe_serve.server.edge.errors import json_response
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.ranks.bridge import Bridge


class PauseBody(Body):
    """mode: running requests end (abort, the default), or wait (retract)"""

    mode: (
        Annotated[
            Literal["abort", "retract"],
            Meta(
                extra={
                    "expected": "abort or retract; in_place is not supported: with retract, requests go on with the "
                    "same tokens too"
                }
            ),
        ]
        | None
    ) = None


class AbortBody(Body):
    """Names the requests to end."""

    rid: Name | None = None
    abort_all: bool | None = None
    abort_message: None = None


def add_generation_control(app: FastAPI, bridge: Bridge, bodies: Bodies) -> None:
    """Adds /pause_generation (/pause), /continue_generation (/resume), /abort_request and /flush_cache

    (/reset_prefix_cache, as vLLM calls it).
    """

    @app.post("/pause_generation", tags=[ADMIN])
    @app.post("/pause", tags=[ADMIN])
    async def pause(request: Request) -> Response:
        """Takes all requests from the ranks and sends none until /continue_generation. New requests wait."""
        async with bodies.read(request) as body:
            given = read_body(body, PauseBody, may_be_empty=True)
        await bridge.api_servers.pause(abort=given.mode != "retract")
        return json_response({"status": "ok", "message": "Generation paused successfully."})

    @app.post("/continue_generation", tags=[ADMIN])
    @app.post("/resume", tags=[ADMIN])
    async def resume() -> Response:
        """Sends requests to the ranks again."""
        await bridge.api_servers.resume()
        return json_response({"status": "ok", "message": "Generation continued successfully."})

    @app.post("/abort_request", tags=[ADMIN])
    async def abort(request: Request) -> Response:
        """Ends the requests with this rid, or all, with finish_reason abort and any output so far."""
        async with bodies.read(request) as body:
            given = read_body(body, AbortBody, may_be_empty=True)
        if given.rid is None and not given.abort_all:
            raise RequestError("abort_request needs rid, or abort_all: true", field="rid")
        await bridge.api_servers.cut_short(None if given.abort_all else given.rid)
        return Response(status_code=200)

    @app.get("/flush_cache", tags=[ADMIN])
    @app.post("/flush_cache", tags=[ADMIN])
    @app.post("/reset_prefix_cache", tags=[ADMIN])
    async def flush_cache() -> Response:
        """Empties the prefix cache of every rank that takes part; 400 while requests are open, as in SGLang."""
        answers = await bridge.flush_cache()
        refusals = [f"rank {answer.rank}: {answer.text}" for answer in answers if not answer.ok]
        if refusals:
            raise RequestError("; ".join(refusals))
        flushed = ", ".join(f"{answer.text} of rank {answer.rank}" for answer in answers)
        masked = "".join(f"; rank {rank} is masked and keeps its own" for rank in bridge.workers.masked)
        return Response(f"Cache flushed.\n{flushed}{masked}\n", media_type="text/plain")
