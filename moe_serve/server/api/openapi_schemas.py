"""The JSON schemas of the bodies of OpenAI's routes and of `/tokenize`. Pure data, torch-free; a test holds them
against the parsers.
"""

from typing import Any

from moe_serve.server.api import chat_request, completion_request
from moe_serve.server.api.call_options import NEUTRAL_FIELDS, NOTED_FIELDS
from moe_serve.server.api.messages import MAX_KWARGS
from moe_serve.server.api.response_request import NOT_HERE
from moe_serve.server.api.sampling_fields import NEUTRAL_PARAMS, OPENAI_NAMES
from moe_serve.server.api.schema_parts import IDS, NAME, RANK, Schema, neutral, or_null
from moe_serve.server.api.tool_fields import MAX_TOOLS
from moe_serve.server.requests.waiting_line import MAX_PRIORITY

_FLAG: Schema = or_null({"type": "boolean"})
_COUNT: Schema = or_null({"type": "integer", "minimum": 0})
_TEXT: Schema = or_null({"type": "string"})
_OBJECTS: Schema = or_null({"type": "array", "items": {"type": "object"}})
_JSON_SCHEMA: Schema = or_null({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]})
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": NAME,
        "content": or_null({"anyOf": [{"type": "string"}, {"type": "array"}]}),
        "name": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": _OBJECTS,
        "tool_call_id": _TEXT,
    },
}
_CHAT_PROMPT: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": or_null({"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS}),
    "documents": _OBJECTS,
    "chat_template": {**_TEXT, "description": "only where the server trusts those of requests"},
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "chat_template_kwargs": or_null({"type": "object", "maxProperties": MAX_KWARGS}),
    "reasoning_effort": or_null(NAME),
}
_FORM: dict[str, Schema] = {  # what an output must match; one of them
    "response_format": or_null({"type": "object", "required": ["type"]}),
    "structured_outputs": or_null({"type": "object"}),
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _TEXT,
    "guided_choice": or_null({"type": "array", "items": {"type": "string"}}),
    "guided_grammar": _TEXT,
    "guided_whitespace_pattern": _TEXT,
    "json_schema": _TEXT,
    "regex": _TEXT,
    "ebnf": _TEXT,
    "structural_tag": or_null({"anyOf": [{"type": "object"}, {"type": "string"}]}),
}
_CALL: dict[str, Schema] = {
    "model": _TEXT,
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
    **_FORM,
}  # fmt: skip


def openai_schemas(sampling: Schema) -> dict[str, Schema]:
    """Returns the schemas by name. sampling: of `/generate`'s sampling_params"""
    common = {**neutral(NEUTRAL_FIELDS), **_CALL, **_sampling(sampling["properties"])}
    return {
        "CompletionRequest": _object(
            {
                **common,
                **neutral(completion_request.NEUTRAL_FIELDS),
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
                **neutral(chat_request.NEUTRAL_FIELDS),
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
                "instructions": _TEXT,
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
                "model": _TEXT,
                "prompt": _TEXT,
                "return_token_strs": _FLAG,
                "mm_processor_kwargs": {"enum": [None]},
                "media_io_kwargs": {"enum": [None]},
            },
            example={"prompt": "def "},
        ),
        "DetokenizeRequest": _object(
            {"model": _TEXT, "tokens": {**IDS, "minItems": 0}}, required=["tokens"], example={"tokens": [5, 6]}
        ),
    }  # fmt: skip


def _sampling(of_generate: dict[str, Schema]) -> dict[str, Schema]:
    """Returns the schemas of sampling parameters by OpenAI's names."""
    fields = {{"sampling_seed": "seed"}.get(name, name): schema for name, schema in of_generate.items()}
    named = {
        name: schema
        for field, schema in fields.items()
        if field not in NEUTRAL_PARAMS and field not in _FORM
        for name in OPENAI_NAMES.of(field)
    }
    for name in OPENAI_NAMES.of("max_new_tokens"):
        named[name] = or_null({"type": "integer", "minimum": 0})  # without it: 16, or in a chat all that fits
    return named


def _object(properties: dict[str, Schema], example: dict[str, Any], required: list[str] | None = None) -> Schema:
    schema = {"type": "object", "additionalProperties": False, "properties": properties, "example": example}
    return schema if required is None else {**schema, "required": required}
