"""The live page at /dashboard: a page, its scripts and style, and the data that it asks for. Torch-free.

The page asks nothing of other servers, and its Content-Security-Policy allows nothing else.
"""

import time
import uuid
from importlib import resources

from fastapi import FastAPI, Request, Response

from moe_serve.config import ServeConfig, served_name
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.edge.guard import OPEN
from moe_serve.server.observe.dashboard.data import Seen, page_data
from moe_serve.server.ranks.bridge import Bridge

_FILES = {
    "": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_dashboard(app: FastAPI, config: ServeConfig, bridge: Bridge) -> None:
    """Adds /dashboard and what it loads."""
    start = uuid.uuid4().hex
    folder = resources.files("moe_serve.server.observe.dashboard")

    def add_file(path: str, name: str, media_type: str) -> None:
        content = (folder / name).read_bytes()

        @app.get(f"/dashboard{path}", include_in_schema=False, tags=[OPEN])
        async def file() -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

    for path, (name, media_type) in _FILES.items():
        add_file(path, name, media_type)

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(request: Request) -> Response:
        """What is new since the windows, events and placement that the query names."""
        seen = Seen.from_query(request.query_params)
        system = {
            "model": served_name(config.model),
            "state": bridge.problem() or "ready",
            "requests": {"open": bridge.num_open, **bridge.counters},
        }
        answer = page_data(bridge.workers, bridge.balance, system, start, seen, time.time())
        return Response(json_bytes(answer), media_type="application/json", headers=_HEADERS)
