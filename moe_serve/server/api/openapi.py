"""The OpenAPI document: what bodies hold, what errors look like, which key a route needs. Pure data, torch-free.

Routes read their bodies themselves, so that FastAPI cannot know them; a test compares the schema with the parser.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from moe_serve.attention_dp.constraint import MAX_CHARS
from moe_serve.attention_dp.sampling_params import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROB_IDS,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_STOP_REGEXES,
    MAX_STOPS,
)
from moe_serve.server.api.openapi_schemas import openai_schemas
from moe_serve.server.api.sampling_fields import MAX_STOP_CHARS, NEUTRAL_PARAMS
from moe_serve.server.api.schema_parts import IDS, NAME, RANK, Schema, neutral, or_null
from moe_serve.server.api.schemas import NEUTRAL_FIELDS
from moe_serve.server.edge.guard import ADMIN, OPEN
from moe_serve.server.requests.waiting_line import MAX_PRIORITY

_LOGPROB_IDS: Schema = {**IDS, "minItems": 0, "maxItems": MAX_LOGPROB_IDS}
_FORM: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_CHARS}  # of the output: what it must match
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _each(schema: Schema) -> Schema:
    """Returns the schema of a value for all prompts, or a list with one for each."""
    return {"anyOf": [schema, {"type": "array", "items": or_null(schema)}, {"type": "null"}]}


SAMPLING_PARAMS: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "max_new_tokens": or_null({"type": "integer", "minimum": 0, "default": 128}),
        "min_new_tokens": or_null({"type": "integer", "minimum": 0, "default": 0}),
        "temperature": or_null({"type": "number", "minimum": 0, "default": 1.0}),
        "top_p": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1.0}),
        "min_p": or_null({"type": "number", "minimum": 0, "maximum": 1, "default": 0.0}),
        "top_k": or_null({"type": "integer", "minimum": -1, "default": -1}),
        "stop": or_null({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
        "stop_regex": or_null(
            {"anyOf": [_STOP, {"const": ""}, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_REGEXES}]}
        ),
        "stop_token_ids": or_null({**IDS, "minItems": 0, "maxItems": MAX_STOPS}),
        "sampling_seed": or_null({"type": "integer", "minimum": 0, "maximum": MAX_SEED}),
        "ignore_eos": or_null({"type": "boolean", "default": False}),
        "skip_special_tokens": or_null({"type": "boolean", "default": True}),
        "no_stop_trim": or_null({"type": "boolean", "default": False}),
        "frequency_penalty": or_null({"type": "number", "minimum": -2, "maximum": 2, "default": 0.0}),
        "presence_penalty": or_null({"type": "number", "minimum": -2, "maximum": 2, "default": 0.0}),
        "repetition_penalty": or_null({"type": "number", "minimum": 0.01, "maximum": 100, "default": 1.0}),
        "logit_bias": or_null(
            {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
                "maxProperties": MAX_BIASES,
            }
        ),
        "bad_words": or_null({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_BAD_WORDS}]}),
        "bad_words_ids": or_null(
            {"type": "array", "items": {**IDS, "maxItems": MAX_BAD_WORD_TOKENS}, "maxItems": MAX_BAD_WORDS}
        ),
        "allowed_token_ids": or_null({**IDS, "minItems": 0, "maxItems": MAX_ALLOWED}),
        "best_of": or_null({"type": "integer", "minimum": 1, "maximum": MAX_SAMPLES}),
        "n": or_null({"type": "integer", "minimum": 1, "maximum": MAX_SAMPLES, "default": 1}),
        "json_schema": or_null({"anyOf": [_FORM, {"type": ["object", "boolean"]}]}),
        "regex": or_null(_FORM),
        "ebnf": or_null(_FORM),
        "structural_tag": or_null({"anyOf": [_FORM, {"type": "object"}]}),
        **neutral(NEUTRAL_PARAMS),
    },
}
GENERATE: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "text": or_null(
            {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}]}
        ),
        "input_ids": or_null({"anyOf": [IDS, {"type": "array", "items": IDS}]}),
        "priority": or_null({"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0}),
        "timeout": or_null({"type": "number", "exclusiveMinimum": 0}),
        "stream_options": or_null(
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {"incremental": or_null({"type": "boolean"}), "include_usage": {"type": "boolean"}},
            }
        ),
        "sampling_params": _each({"$ref": "#/components/schemas/SamplingParams"}),
        "stream": or_null({"type": "boolean", "default": False}),
        "return_logprob": _each({"type": "boolean", "default": False}),
        "logprob_start_len": _each({"type": "integer", "minimum": -1, "default": -1}),
        "top_logprobs_num": _each({"type": "integer", "minimum": 0, "default": 0}),
        "token_ids_logprob": or_null(
            {"anyOf": [_LOGPROB_IDS, {"type": "array", "items": or_null(_LOGPROB_IDS)}]},
        ),
        "return_text_in_logprobs": or_null({"type": "boolean", "default": False}),
        "rid": _each(NAME),
        "session_id": _each(NAME),
        "cache_salt": or_null(NAME),
        "extra_key": or_null(NAME),
        "routed_dp_rank": or_null(RANK),
        "data_parallel_rank": or_null(RANK),
        **neutral(NEUTRAL_FIELDS),
    },
    "oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}],
    "example": {"text": "def ", "sampling_params": {"max_new_tokens": 16, "temperature": 0}},
}
PLACEMENT: Schema = {
    "description": "one list of experts for each MoE layer, bare or in an object",
    "anyOf": [
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        {"type": "object", "required": ["physical_to_logical_map"]},
    ],
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
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
        }
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
_BODIES = {
    "/generate": "GenerateRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/responses": "ResponseRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/eplb/placement": "Placement",
}
_STREAMS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses")
_TEXT = ("/metrics", "_expert_distribution_record", "/flush_cache")  # routes whose answer is plain text


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns the OpenAPI document of the application."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    components["schemas"] = {
        "GenerateRequest": GENERATE,
        "SamplingParams": SAMPLING_PARAMS,
        "Placement": PLACEMENT,
        **openai_schemas(SAMPLING_PARAMS),
        "Error": _ERROR,
    }
    components["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer", "description": "where the server has API keys"},
        "admin_key": {"type": "http", "scheme": "bearer", "description": "where the server has an admin key"},
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["operationId"] = f"{method}{path.replace('/', '_')}"
            _describe(operation, path, has_body=method in ("post", "put") and path in _BODIES)
    return document


def _describe(operation: dict[str, Any], path: str, has_body: bool) -> None:
    tags = operation.get("tags", [])
    if OPEN not in tags:
        operation["security"] = [{"admin_key" if ADMIN in tags else "api_key": []}, {}]
    if has_body:
        schema = {"$ref": f"#/components/schemas/{_BODIES[path]}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which no route gives
    if path in _STREAMS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    elif path.endswith(_TEXT):
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {status: {"description": words, "content": error} for status, words in _ERRORS.items()}
    if "{" in path or (path in _BODIES and path not in ("/generate", "/eplb/placement")):  # which name a model
        responses["404"] = {"description": "there is nothing of this name", "content": error}
