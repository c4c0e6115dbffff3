"""The OpenAPI document of all routes.

Routes read their bodies themselves, so that FastAPI cannot know them; a test compares the schema with the parser.
"""

from collections.abc import Mapping
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
from moe_serve.server.api.messages import MAX_KWARGS
from moe_serve.server.api.openai_requests import (
    CHAT_NEUTRAL_FIELDS,
    COMPLETION_NEUTRAL_FIELDS,
    NOTED_FIELDS,
    OPENAI_NEUTRAL_FIELDS,
)
from moe_serve.server.api.response_request import NOT_HERE
from moe_serve.server.api.sampling_fields import MAX_STOP_CHARS, NEUTRAL_PARAMS, OPENAI_NAMES
from moe_serve.server.api.schemas import NEUTRAL_FIELDS
from moe_serve.server.api.tool_fields import MAX_TOOLS
from moe_serve.server.edge.guard import ADMIN, OPEN
from moe_serve.server.edge.json_fields import MAX_NAME_CHARS
from moe_serve.server.requests.admission import MAX_PRIORITY

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
RANK: Schema = {"type": "integer", "minimum": 0}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def or_null(schema: Schema) -> Schema:
    """Returns the schema of a value that may also be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def neutral(values: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Returns the schemas of fields that may only ask for nothing."""
    return {name: {"enum": [None, *allowed]} for name, allowed in values.items()}


_FLAG: Schema = or_null({"type": "boolean"})
_COUNT: Schema = or_null({"type": "integer", "minimum": 0})
_OPENAI_TEXT: Schema = or_null({"type": "string"})
_OBJECTS: Schema = or_null({"type": "array", "items": {"type": "object"}})
_JSON_SCHEMA: Schema = or_null({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]})
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": NAME,
        "content": or_null({"anyOf": [{"type": "string"}, {"type": "array"}]}),
        "name": _OPENAI_TEXT,
        "reasoning_content": _OPENAI_TEXT,
        "tool_calls": _OBJECTS,
        "tool_call_id": _OPENAI_TEXT,
    },
}
_CHAT_PROMPT: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": or_null({"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS}),
    "documents": _OBJECTS,
    "chat_template": {**_OPENAI_TEXT, "description": "only where the server trusts those of requests"},
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "chat_template_kwargs": or_null({"type": "object", "maxProperties": MAX_KWARGS}),
    "reasoning_effort": or_null(NAME),
}
_OPENAI_FORM: dict[str, Schema] = {  # what an output must match; one of them
    "response_format": or_null({"type": "object", "required": ["type"]}),
    "structured_outputs": or_null({"type": "object"}),
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _OPENAI_TEXT,
    "guided_choice": or_null({"type": "array", "items": {"type": "string"}}),
    "guided_grammar": _OPENAI_TEXT,
    "guided_whitespace_pattern": _OPENAI_TEXT,
    "json_schema": _OPENAI_TEXT,
    "regex": _OPENAI_TEXT,
    "ebnf": _OPENAI_TEXT,
    "structural_tag": or_null({"anyOf": [{"type": "object"}, {"type": "string"}]}),
}
_CALL: dict[str, Schema] = {
    "model": _OPENAI_TEXT,
    "stream": _FLAG,
    "stream_options": or_null(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "include_usage": _FLAG, "continuous_usage_stats": _FLAG, "include_obfuscation": {"enum": [None, False]},
            },
        }
    ),
    "return_token_ids": _FLAG,
    "rid": or_null(NAME),
    "request_id": or_null(NAME),
    "cache_salt": or_null(NAME),
    "extra_key": or_null(NAME),
    "priority": or_null({"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0}),
    "timeout": or_null({"type": "number", "exclusiveMinimum": 0}),
    "routed_dp_rank": or_null(RANK),
    "data_parallel_rank": or_null(RANK),
    **{name: {"description": "changes no answer"} for name in NOTED_FIELDS},
    **_OPENAI_FORM,
}  # fmt: skip


def openai_schemas(sampling: Schema) -> dict[str, Schema]:
    """Returns the schemas by name. sampling: of `/generate`'s sampling_params"""
    common = {**neutral(OPENAI_NEUTRAL_FIELDS), **_CALL, **_sampling(sampling["properties"])}
    return {
        "CompletionRequest": _object(
            {
                **common,
                **neutral(COMPLETION_NEUTRAL_FIELDS),
                "prompt": {
                    "anyOf": [
                        {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}},
                        IDS, {"type": "array", "items": IDS},
                    ]
                },
                "add_special_tokens": _FLAG,
                "echo": _FLAG,
                "logprobs": _COUNT,
                "prompt_logprobs": _COUNT,
            },
            required=["prompt"],
            example={"model": "demo", "prompt": "def ", "max_tokens": 16, "temperature": 0},
        ),
        "ChatRequest": _object(
            {
                **common,
                **neutral(CHAT_NEUTRAL_FIELDS),
                **_CHAT_PROMPT,
                "logprobs": _FLAG,
                "top_logprobs": _COUNT,
                "tool_choice": or_null({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
                "parallel_tool_calls": _FLAG,
                "separate_reasoning": _FLAG,
                "include_reasoning": _FLAG,
                "stream_reasoning": _FLAG,
            },
            required=["messages"],
            example={"model": "demo", "messages": [{"role": "user", "content": "def "}], "max_tokens": 16},
        ),
        "ResponseRequest": {  # and what chats have; the parser makes one of it, and names what is wrong
            "type": "object",
            "required": ["input"],
            "properties": {
                **{name: schema for name, schema in common.items() if name not in NOT_HERE},
                "input": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                "instructions": _OPENAI_TEXT,
                "max_output_tokens": _COUNT,
                "tools": _OBJECTS,
                "text": or_null({"type": "object"}),
                "reasoning": or_null({"type": "object"}),
                "previous_response_id": {"enum": [None], "description": "nothing is stored"},
            },
            "example": {"model": "demo", "input": "def ", "max_output_tokens": 16},
        },
        "TokenizeRequest": _object(
            {
                **_CHAT_PROMPT,
                "model": _OPENAI_TEXT,
                "prompt": _OPENAI_TEXT,
                "return_token_strs": _FLAG,
                "mm_processor_kwargs": {"enum": [None]},
                "media_io_kwargs": {"enum": [None]},
            },
            example={"prompt": "def "},
        ),
        "DetokenizeRequest": _object(
            {"model": _OPENAI_TEXT, "tokens": {**IDS, "minItems": 0}}, required=["tokens"], example={"tokens": [5, 6]}
        ),
    }  # fmt: skip


def _sampling(of_generate: dict[str, Schema]) -> dict[str, Schema]:
    """Returns the schemas of sampling parameters by OpenAI's names."""
    fields = {{"sampling_seed": "seed"}.get(name, name): schema for name, schema in of_generate.items()}
    named = {
        name: schema
        for field, schema in fields.items()
        if field not in NEUTRAL_PARAMS and field not in _OPENAI_FORM
        for name in OPENAI_NAMES.of(field)
    }
    for name in OPENAI_NAMES.of("max_new_tokens"):
        named[name] = or_null({"type": "integer", "minimum": 0})  # without it: 16, or in a chat all that fits
    return named


def _object(properties: dict[str, Schema], example: dict[str, Any], required: list[str] | None = None) -> Schema:
    schema = {"type": "object", "additionalProperties": False, "properties": properties, "example": example}
    return schema if required is None else {**schema, "required": required}


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
