"""The OpenAPI document of all routes. The schemas of bodies are those of the structs that parse them."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from moe_serve.server.api.anthropic import CountTokensBody, MessagesBody
from moe_serve.server.api.embeddings import EmbeddingBody, PairsBody, RerankBody
from moe_serve.server.api.generation_control import AbortBody, PauseBody
from moe_serve.server.api.native import GenerateBody
from moe_serve.server.api.openai_requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moe_serve.server.api.responses import ResponseBody
from moe_serve.server.api.score import ScoreBody
from moe_serve.server.edge.body import Body, Only
from moe_serve.server.edge.guard import ADMIN, OPEN

Schema = dict[str, Any]

_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param", "retryable"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "integer"},
                "param": {"type": ["string", "null"], "description": "the field to change"},
                "retryable": {"type": "boolean"},
            },
        },
    },
}
_ERRORS = {
    "400": "the request is wrong, and the error names the field",
    "401": "an API key is needed",
    "403": "not with this key, or not for a page of another site",
    "408": "the request did not arrive in time, or had no token within its own timeout",
    "409": "not in the state that the server is in",
    "413": "the body is too large",
    "415": "the body is not plain JSON",
    "421": "this server is not called by that name",
    "429": "too many requests; try again after the time in Retry-After",
    "503": "the server starts or ends, or a rank is lost; try again after the time in Retry-After",
}
BODIES: dict[str, type[Body]] = {
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v1/score": ScoreBody,
    "/score": PairsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/pause_generation": PauseBody,
    "/pause": PauseBody,
    "/abort_request": AbortBody,
}
# Ends of routes whose answer is plain text.
_TEXT = ("/metrics", "_expert_distribution_record", "/flush_cache", "/reset_prefix_cache")


_NAMES = {"SglangParams": "SamplingParams", "PlacementBody": "Placement"}  # which clients generated from it know
_REF = "#/components/schemas/"


def body_schemas(bodies: Mapping[str, type[Body]] = BODIES) -> dict[str, Schema]:
    """Returns the schemas of all bodies, and of the structs inside them, by name. bodies: by path"""
    bodies_once = {body.__name__: body for body in bodies.values()}
    _, found = msgspec.json.schema_components(
        bodies_once.values(), schema_hook=_only_schema, ref_template=f"{_REF}{{name}}"
    )
    text = re.sub(f'(?<="{_REF})\\w+', lambda match: _name(match[0]), msgspec.json.encode(found).decode())
    schemas: dict[str, Schema] = {}
    for own_name, schema in msgspec.json.decode(text).items():
        schemas[_name(own_name)] = schema
        if own_name in bodies_once and (example := bodies_once[own_name].example) is not None:
            schema["example"] = example
        schema.pop("title", None)
        for field in schema["properties"].values():
            if field.get("default", 0) is None:  # left out; what is done then is said with the type
                del field["default"]
    schemas["GenerateRequest"]["oneOf"] = [{"required": ["text"]}, {"required": ["input_ids"]}]
    return schemas


def _only_schema(kind: type) -> Schema:
    assert issubclass(kind, Only)
    return {"enum": list(kind.values)}


def _name(struct: str) -> str:
    """Returns the name of a struct's schema."""
    return _NAMES.get(struct) or re.sub("Body$", "Request", struct)


def describe(app: FastAPI, bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    """Returns the OpenAPI document of the application. bodies: of its routes, by path"""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    components["schemas"] = {**body_schemas(bodies), "Error": _ERROR}
    components["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer", "description": "where the server has API keys"},
        "admin_key": {"type": "http", "scheme": "bearer", "description": "where the server has an admin key"},
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["operationId"] = f"{method}{path.replace('/', '_')}"
            _describe(operation, path, bodies.get(path) if method in ("post", "put") else None)
    return document


def _describe(operation: dict[str, Any], path: str, body: type[Body] | None) -> None:
    tags = operation.get("tags", [])
    if OPEN not in tags:
        operation["security"] = [{"admin_key" if ADMIN in tags else "api_key": []}, {}]
    if body is not None:
        schema = {"$ref": f"{_REF}{_name(body.__name__)}"}
        is_needed = body.example is not None
        operation["requestBody"] = {"required": is_needed, "content": {"application/json": {"schema": schema}}}
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which no route gives
    fields = () if body is None else body.__struct_fields__
    if "stream" in fields:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    elif path.endswith(_TEXT):
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": f"{_REF}Error"}}}
    responses |= {status: {"description": words, "content": error} for status, words in _ERRORS.items()}
    if "{" in path or "model" in fields:
        responses["404"] = {"description": "there is nothing of this name", "content": error}
