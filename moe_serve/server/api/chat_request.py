"""Parses the body of `/v1/chat/completions`: JSON bytes in, checked values out. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.api.call_options import REST_OF_CONTEXT, CallOptions, fields_of, take_options
from moe_serve.server.api.messages import MAX_DEPTH, ChatPrompt, take_chat_prompt
from moe_serve.server.api.tool_fields import ReasoningUse, ToolUse, take_reasoning_use, take_tool_use
from moe_serve.server.edge.json_fields import boolean, natural_number, parse_nested_object

NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


@dataclass(frozen=True)
class ChatRequest:
    """One call of `/v1/chat/completions`."""

    prompt: ChatPrompt
    options: CallOptions
    tools: ToolUse
    reasoning: ReasoningUse
    logprobs: bool = False  # choices have log probabilities


def parse_chat(body: bytes, max_prompts: int) -> ChatRequest:
    """Returns the checked request in a JSON body. max_prompts: of a batch, which a chat never is

    Raises RequestError with the field, its value and what was expected.
    """
    return check_chat(parse_nested_object(body, MAX_DEPTH), "chatcmpl-")


def check_chat(content: dict[str, Any], id_prefix: str) -> ChatRequest:
    """Returns the checked request of a JSON object. id_prefix: of the id that the server gives it"""
    values = fields_of(content, NEUTRAL_FIELDS)
    prompt = take_chat_prompt(values)
    options = take_options(values, REST_OF_CONTEXT, id_prefix)
    if not prompt.messages:
        raise RequestError("messages is an empty list, expected at least one message", field="messages")
    logprobs = bool(values.take("logprobs", boolean))
    num_top = values.take("top_logprobs", natural_number) or 0
    tools = take_tool_use(values, prompt.tools)
    reasoning = take_reasoning_use(values)
    values.refuse_the_rest()
    if num_top and not logprobs:
        raise RequestError("top_logprobs is given, but logprobs is not true; set it", field="top_logprobs")
    if logprobs:
        options = options.with_params(logprobs=num_top)
    if (constraint := tools.constraint()) is not None:
        options = options.with_params(constraint=constraint)
        options.taken.params.validate()
    if tools.choice == "none":
        prompt = replace(prompt, tools=None)  # a model that reads of tools would call them
    return ChatRequest(prompt, options, tools, reasoning, logprobs)
