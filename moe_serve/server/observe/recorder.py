"""SGLang's routes of the expert load recorder: start, stop and dump. Torch-free."""

from fastapi import FastAPI, Response

from moe_serve.config import ServeConfig
from moe_serve.engine.protocol.messages import RecordCommand
from moe_serve.errors import RequestError
from moe_serve.server.edge.errors import error_body, json_bytes
from moe_serve.server.edge.guard import ADMIN
from moe_serve.server.ranks.bridge import Bridge


def add_recorder(app: FastAPI, config: ServeConfig, bridge: Bridge) -> None:
    """Adds `/{start,stop,dump}_expert_distribution_record`: SGLang's plain text, then what was done, and the files.

    GET and POST do the same, as in SGLang.
    """

    async def run(command: str, done: str) -> Response:
        if config.eplb.mode == "off":
            raise RequestError(
                "eplb.mode is off, so expert load is not recorded; start the server with eplb.mode=static"
            )
        answer = await bridge.command(RecordCommand(0, command))
        if not answer.ok:
            return Response(json_bytes(error_body(answer.text, 409)), 409, media_type="application/json")
        lines = [done, answer.text, *answer.facts.get("files", [])]
        return Response("".join(f"{line}\n" for line in lines), media_type="text/plain")

    @app.get("/start_expert_distribution_record", tags=[ADMIN])
    @app.post("/start_expert_distribution_record", tags=[ADMIN])
    async def start() -> Response:
        """Begins a recording; one that runs is dropped."""
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
