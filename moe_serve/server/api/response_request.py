"""Parses the body of `/v1/responses`: it becomes the body of a chat, which is then checked as one.

Nothing is stored: a conversation is sent whole each time, and previous_response_id is refused. Fields that both routes
have, with those of vLLM and SGLang, keep their meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.api.messages import MAX_DEPTH
from moe_serve.server.api.openai_requests import ChatRequest, check_chat
from moe_serve.server.api.tool_fields import EXAMPLE, EXAMPLE_CHOICE
from moe_serve.server.edge.json_fields import parse_nested_object, show

# Of the same meaning under another name.
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
# Known fields that change nothing here, with the values that are accepted besides null; None: any
_NOTED: Mapping[str, tuple[Any, ...] | None] = {
    "store": None,
    "truncation": ("disabled",),
    "background": (False,),
    "max_tool_calls": (),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "top_logprobs": (0,),
}
_LOGPROBS = "message.output_text.logprobs"
_ECHOED = ("instructions", "metadata", "max_output_tokens", "user", "reasoning", "text")
_IN_OWN_WORDS = (  # what errors call the fields of a chat, and what these are here; longer ones first
    (EXAMPLE, 'send {"type": "function", "name": "f", "parameters": {…}}'),
    (EXAMPLE_CHOICE, '{"type": "function", "name": "f"}'),
    ("].function.", "]."),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)
NOT_HERE = ("messages", "n", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "logprobs")


@dataclass(frozen=True)
class ResponseRequest:
    """One call of `/v1/responses`. echoed: fields of the body that the answer repeats"""

    chat: ChatRequest
    echoed: dict[str, Any]


def parse_response(body: bytes, max_prompts: int) -> ResponseRequest:
    """Returns the checked request in a JSON body. max_prompts: of a batch, which a response never is

    Raises RequestError with the field, its value and what was expected; items of `input` are named as messages.
    """
    content = parse_nested_object(body, MAX_DEPTH)
    for name in NOT_HERE:
        if content.get(name) is not None:
            raise RequestError(f"{name} is a field of /v1/chat/completions; leave it out", field=name)
    echoed = {name: content.get(name) for name in _ECHOED}
    echoed |= {"tools": content.get("tools") or [], "tool_choice": content.get("tool_choice") or "auto"}
    echoed["parallel_tool_calls"] = content.get("parallel_tool_calls") is not False
    for name, accepted in _NOTED.items():
        value = content.pop(name, None)
        if value is not None and accepted is not None and value not in accepted:
            raise RequestError(f"{name} is {show(value)}, but this is not supported; leave it out", field=name)
    include = content.pop("include", None)  # what else is known asks for items that do not come here
    if isinstance(include, list) and _LOGPROBS in include:
        raise RequestError(f"include holds {_LOGPROBS}, but only chats have logprobs; leave it out", field="include")
    chat = {_RENAMED.get(name, name): value for name, value in content.items()}
    chat["messages"] = _messages(chat.pop("instructions", None), chat.pop("input", None))
    chat["tools"] = _tools(chat.pop("tools", None))
    chat["tool_choice"] = _tool_choice(chat.pop("tool_choice", None))
    reasoning, text = _object("reasoning", chat.pop("reasoning", None)), _object("text", chat.pop("text", None))
    chat["reasoning_effort"] = reasoning.get("effort")
    chat["response_format"] = _format(text.get("format"))
    try:
        checked = check_chat(chat, "resp_")
    except RequestError as error:
        raise RequestError(_in_own_words(str(error)), error.field and _in_own_words(error.field)) from None
    constraint = checked.options.taken.params.constraint
    if constraint is not None:
        own = replace(constraint, path=_in_own_words(constraint.path))
        checked = replace(checked, options=checked.options.with_params(constraint=own))
    return ResponseRequest(checked, echoed)


def _in_own_words(text: str) -> str:
    """Returns a message or the name of a field of a chat as this route has it."""
    for theirs, ours in _IN_OWN_WORDS:
        text = text.replace(theirs, ours)
    return text


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise RequestError(f"{name} is {show(value)}, expected an object", field=name)
    return value or {}


def _messages(instructions: Any, given: Any) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Reasoning and calls in a row belong to one message of the assistant."""
    if not isinstance(instructions, str | None):
        raise RequestError(f"instructions is {show(instructions)}, expected a string", field="instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RequestError(f"input is {show(given)}, expected a string or a list of items", field="input")
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} is {show(item)}, expected an object", field=path)
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_with_reasoning(messages, {"role": item.get("role"), "content": item.get("content")}))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": _text_of(path, item)})
        else:
            raise RequestError(
                f"{path}.type is {show(kind)}, expected message, function_call, function_call_output or reasoning",
                field=f"{path}.type",
            )
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message at the end, a new one where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _with_reasoning(messages: list[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the reasoning that stands before it, which is no message of its own then."""
    last = messages[-1] if messages else {}
    is_alone = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
    return {**messages.pop(), **message} if message["role"] == "assistant" and is_alone else message


def _text_of(path: str, item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise RequestError(f"{path}.content is {show(parts)}, expected a list of parts with a text", f"{path}.content")
    return "\n".join(part["text"] for part in parts)


def _tools(given: Any) -> Any:
    """Returns tools as chats have them: the fields of a function in an object of their own."""
    if not isinstance(given, list):
        return given
    keys = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in given
    ]


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


def _format(given: Any) -> Any:
    """Returns response_format as chats have it."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}
