"""The pages at / and /docs: what this server has. They load nothing of other servers and run no script. Torch-free."""

from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.server.api.docs.page import docs_page, front_page
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.edge.guard import OPEN

LINKS = {
    "/v1/models": "the model, as OpenAI's API lists it; its base URL ends with /v1",
    "/v1/chat/completions": "chats, OpenAI's API",
    "/v1/completions": "completions, OpenAI's API",
    "/v1/responses": "responses, OpenAI's API",
    "/generate": "SGLang's native API",
    "/docs": "all routes, their fields and errors",
    "/openapi.json": "the same for programs",
    "/dashboard": "load of experts and ranks, live",
    "/metrics": "for Prometheus",
    "/server_info": "configuration, limits, state of the ranks",
    "/health": "whether the front end runs; /ready: whether the model serves",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


def add_docs(app: FastAPI, document: dict[str, Any]) -> None:
    """Adds / and /docs. document: the OpenAPI document, for which an API key is needed where there are some"""
    docs = docs_page(document).encode()
    listed = document["paths"]  # those that are not are pages
    methods = {path: "POST" if path in listed and "get" not in listed[path] else "GET" for path in LINKS}
    front = front_page([(methods[path], path, words) for path, words in LINKS.items()]).encode()
    paths = {path: words if methods[path] == "GET" else f"{words} (POST)" for path, words in LINKS.items()}
    style = (resources.files("moe_serve.server.api.docs") / "page.css").read_bytes()

    @app.get("/", tags=[OPEN], include_in_schema=False)
    async def root(request: Request) -> Response:
        """What is here: a page for browsers, else JSON. It says nothing of the model, since anybody may read it."""
        if "text/html" in request.headers.get("accept", ""):
            return Response(front, media_type="text/html", headers=_HEADERS)
        return Response(
            json_bytes({"server": "moe_serve", "paths": paths}), media_type="application/json", headers=_HEADERS
        )

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return Response(docs, media_type="text/html", headers=_HEADERS)

    @app.get("/docs/page.css", tags=[OPEN], include_in_schema=False)
    async def css() -> Response:
        return Response(style, media_type="text/css", headers=_HEADERS)
