"""The pages of the API's documentation, made from the OpenAPI document, without scripts; and the chat beside them.

Swagger UI would load megabytes of scripts from other servers.
"""

import html
import json
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response

from moe_serve.server.api.openapi import Schema
from moe_serve.server.edge.errors import json_response
from moe_serve.server.edge.guard import OPEN
from moe_serve.server.edge.pages import PAGE_HEADERS, add_pages

_METHODS = ("get", "post", "put")
_LONGEST_VALUES = 120
_KEYS = {"api_key": "API key, where the server has some", "admin_key": "admin key"}


def docs_page(document: dict[str, Any]) -> str:
    """Returns the page as HTML. Its addresses are relative, so that it works behind a prefix."""
    schemas = document["components"]["schemas"]
    paths = document["paths"]
    routes = [
        _route(method, path, paths[path][method], schemas)
        for path in sorted(paths, key=lambda path: (not path.startswith("/v1"), path))
        for method in _METHODS
        if method in paths[path]
    ]
    used = [name for name in schemas if name != "Error"]
    bodies = [_body(name, schemas[name]) for name in used]
    return "\n".join([_head(document["info"]["title"], "docs/page.css"), *routes, "<h2>Bodies</h2>", *bodies, _END])


_END = "</body></html>\n"


def _head(title: str, style: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{_text(title)}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="{style}"></head>'
        f"<body><h1>{_text(title)}</h1>"
        '<p><a href="chat">chat</a> · <a href="openapi.json">openapi.json</a> · <a href="dashboard">dashboard</a> · '
        '<a href="metrics">metrics</a></p>'
    )


def _route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Schema]) -> str:
    security = operation.get("security")
    key = "open to all" if not security else _KEYS[next(iter(security[0]))]
    # The anchor is inside the folded part, so that a browser unfolds it for a link to it.
    about = _text(operation.get("description", ""))
    parts = [f'<p id="{_id(method, path)}">{about}</p><p class="soft">{_text(key)}</p>']
    parts += [
        f"<p><code>{_text(parameter['name'])}</code> in the {_text(parameter['in'])}: "
        f"{_text(_kind(parameter.get('schema', {})))}</p>"
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        name = _name(body)
        parts.append(f'<p>body: <a href="#{name}">{name}</a></p>')
        example = schemas[name].get("example")
        if example is not None:
            parts.append(f"<pre>{_text(json.dumps(example))}</pre>")
    answers = [
        f"<tr><td>{_text(status)}</td><td>{_text(answer['description'])}</td></tr>"
        for status, answer in sorted(operation["responses"].items())
    ]
    summary = f'<summary><span class="method">{method.upper()}</span> <code>{_text(path)}</code></summary>'
    return f"<details>{summary}{''.join(parts)}<table>{''.join(answers)}</table></details>"


def _body(name: str, schema: Schema) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for field, kind in schema.get("properties", {}).items():
        words = _kind(kind) + (", required" if field in required else "")
        rows.append(f"<tr><td><code>{_text(field)}</code></td><td>{_text(words)}</td></tr>")
    about = f"<p>{_text(schema['description'])}</p>" if "description" in schema else ""
    head = f"<summary><code>{name}</code></summary>"
    return f'<details id="{name}" open>{head}{about}<table>{"".join(rows)}</table></details>'


def _kind(schema: Schema) -> str:
    """Returns in a few words what a schema allows."""
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "enum" in schema:
        values = ", ".join(json.dumps(value) for value in schema["enum"])
        return f"one of {values}" if len(values) <= _LONGEST_VALUES else f"one of {values[:_LONGEST_VALUES]} …"
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type", "any value")
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if words == "array" and "items" in schema:
        words = f"list of {_kind(schema['items'])}"
    names = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "default": "default"}
    words += "".join(f", {name} {json.dumps(schema[key])}" for key, name in names.items() if key in schema)
    return words + (f" ({schema['description']})" if "description" in schema else "")


def _id(method: str, path: str) -> str:
    """Returns the name of a route's place on the page."""
    return _text(f"{method.lower()}{path.replace('/', '_')}")


def _name(reference: Schema) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _text(value: object) -> str:
    return html.escape(str(value))


LINKS = {
    "/chat": "talk with the model",
    "/v1/models": "the model, as OpenAI's API lists it; its base URL ends with /v1",
    "/v1/chat/completions": "chats, OpenAI's API",
    "/v1/completions": "completions, OpenAI's API",
    "/v1/responses": "responses, OpenAI's API",
    "/v1/messages": "messages, Anthropic's API; its base URL ends before /v1",
    "/generate": "SGLang's native API",
    "/v1/embeddings": "embeddings, OpenAI's API; /v1/rerank: documents by them; /score: pairs of texts",
    "/v1/score": "probabilities of label tokens, as SGLang's",
    "/docs": "all routes, their fields and errors",
    "/openapi.json": "the same for programs",
    "/dashboard": "load of experts and ranks, live",
    "/metrics": "for Prometheus",
    "/server_info": "configuration, limits, state of the ranks",
    "/health": "whether the front end runs; /ready: whether the model serves",
}
_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Vary": "Accept",
}


def add_docs(app: FastAPI, document: dict[str, Any]) -> None:
    """Adds /, /chat and /docs. document: the OpenAPI document; where API keys exist, /docs needs one"""
    docs = docs_page(document).encode()
    listed = document["paths"]  # all others are pages
    methods = {path: "POST" if path in listed and "get" not in listed[path] else "GET" for path in LINKS}
    paths = {path: words if methods[path] == "GET" else f"{words} (POST)" for path, words in LINKS.items()}
    style = (resources.files("moe_serve.server") / "pages" / "docs.css").read_bytes()

    @app.get("/", tags=[OPEN], include_in_schema=False)
    async def root(request: Request) -> Response:
        """Sends browsers to the chat, and lists the routes for programs. It is open, and says nothing of the model."""
        if "text/html" in request.headers.get("accept", ""):
            return Response(status_code=307, headers={**_HEADERS, "Location": "chat"})
        return json_response({"server": "moe_serve", "paths": paths}, headers=_HEADERS)

    add_pages(app, {"/chat": "chat.html", "/chat/chat.css": "chat.css", "/chat/chat.js": "chat.js"})

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return Response(docs, media_type="text/html", headers=_HEADERS)

    @app.get("/docs/page.css", tags=[OPEN], include_in_schema=False)
    async def css() -> Response:
        return Response(style, media_type="text/css", headers=_HEADERS)
