"""The body of `/v1/responses`, which becomes the body of a chat and is then checked as one.

Nothing is stored: a conversation is sent whole each time, and previous_response_id is refused. Fields that both routes
have, with those of vLLM and SGLang, keep their meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from moe_serve.errors import RequestError
from moe_serve.server.api.constraint_fields import ResponseFormat
from moe_serve.server.api.messages import MAX_MESSAGES, Content, Message, Part, text_of
from moe_serve.server.api.openai_requests import ChatBody, ChatFields, ChatRequest, check_chat
from moe_serve.server.api.tool_fields import EXAMPLE, EXAMPLE_CHOICE
from moe_serve.server.edge.json_body import Count, Name, Only, OnlyFalse, read_body

_LOGPROBS = "message.output_text.logprobs"
_IN_OWN_WORDS = (  # what errors call the fields of a chat, and what these are here; longer ones first
    (EXAMPLE, 'send {"type": "function", "name": "f", "parameters": {…}}'),
    (EXAMPLE_CHOICE, '{"type": "function", "name": "f"}'),
    ("].function.", "]."),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)


class OnlyDisabled(Only):
    values = ("disabled",)


class OnlyZero(Only):
    values = (0,)


class InputItem(msgspec.Struct):
    """A message, a call of a function, its output, or the reasoning before them."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Name | None = None
    content: Content | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Content | None = None
    summary: Content | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    """format: what the text must match, as response_format of chats"""

    format: ResponseFormat | None = None
    verbosity: Any = None


class ReasoningOptions(msgspec.Struct, omit_defaults=True):
    """effort: a word for the chat template"""

    effort: Name | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseBody(ChatFields, kw_only=True):
    """A call of /v1/responses."""

    other_words: ClassVar[Mapping[str, str]] = {
        **ChatFields.other_words,
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "max_new_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    }
    example: ClassVar[Mapping[str, Any]] = {"model": "demo", "input": "def ", "max_output_tokens": 16}

    input: Annotated[
        str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)],
        Meta(extra={"expected": "a string or a list of items", "missing": "send a string or a list of items"}),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[Any, Meta(description="asks for items that do not come here")] = None
    store: Annotated[Any, Meta(description="changes no answer: nothing is stored")] = None
    # Known in OpenAI's API, and not supported.
    truncation: OnlyDisabled | None = None
    background: OnlyFalse | None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    context_management: None = None
    top_logprobs: OnlyZero | None = None


_OF_CHATS = tuple(name for name in ChatFields.__struct_fields__ if name != "tools")  # which are written otherwise


@dataclass(frozen=True)
class ResponseRequest:
    """One call of `/v1/responses`. echoed: fields of the body that the answer repeats"""

    chat: ChatRequest
    echoed: dict[str, Any]


def parse_response(body: bytes) -> ResponseRequest:
    """Returns the checked request in a JSON body.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, ResponseBody)
    if isinstance(given.include, list) and _LOGPROBS in given.include:
        raise RequestError(f"include holds {_LOGPROBS}, but only chats have logprobs; leave it out", field="include")
    try:
        checked = check_chat(_as_chat(given), "resp_")
    except RequestError as error:
        raise RequestError(_in_own_words(str(error)), error.field and _in_own_words(error.field)) from None
    constraint = checked.options.taken.params.constraint
    if constraint is not None:
        own = replace(constraint, path=_in_own_words(constraint.path))
        checked = replace(checked, options=checked.options.with_params(constraint=own))
    echoed = {
        "instructions": given.instructions,
        "metadata": given.metadata,
        "max_output_tokens": given.max_output_tokens,
        "user": given.user,
        "reasoning": given.reasoning,
        "text": given.text,
        "tools": given.tools or [],
        "tool_choice": given.tool_choice or "auto",
        "parallel_tool_calls": given.parallel_tool_calls is not False,
    }
    return ResponseRequest(checked, echoed)


def _in_own_words(text: str) -> str:
    """Returns a message or the name of a field of a chat as this route has it."""
    for theirs, ours in _IN_OWN_WORDS:
        text = text.replace(theirs, ours)
    return text


def _as_chat(given: ResponseBody) -> ChatBody:
    """Returns the chat that a response is of. Raises RequestError."""
    return ChatBody(
        messages=_messages(given.instructions, given.input),
        tools=_tools(given.tools),
        tool_choice=_tool_choice(given.tool_choice),
        max_completion_tokens=given.max_output_tokens,
        response_format=None if given.text is None else _format(given.text.format),
        reasoning_effort=None if given.reasoning is None else given.reasoning.effort,
        **{name: getattr(given, name) for name in _OF_CHATS},
    )


def _messages(instructions: str | None, given: str | list[InputItem]) -> list[Message]:
    """Returns the messages of a chat. Reasoning and calls in a row belong to one message of the assistant."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    for i, item in enumerate(items):
        path = f"input[{i}]"
        match item.type:
            case "message":
                role = _needed(f"{path}.role", item.role, "send system, developer, user or assistant")
                content = text_of(f"{path}.content", item.content)
                messages.append(_with_reasoning(messages, {"role": role, "content": content}))
            case "function_call":
                name = _needed(f"{path}.name", item.name, "send the function's")
                function = {"name": name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = text_of(f"{path}.output", item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case "reasoning":
                text = _reasoning(f"{path}.content", item.content or item.summary)
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    return [Message(**message) for message in messages]


def _needed(path: str, value: str | None, do: str) -> str:
    if value is None:
        raise RequestError(f"{path} is missing; {do}", field=path)
    return value


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


def _reasoning(path: str, parts: str | list[str | Part] | None) -> str:
    texts = [
        part if isinstance(part, str) else part.text for part in ([parts] if isinstance(parts, str) else parts or ())
    ]
    if any(text is None for text in texts):
        raise RequestError(f"{path} is a list of {len(texts)}, expected a list of parts with a text", path)
    return "\n".join(text for text in texts if text is not None)


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns tools as chats have them: the fields of a function in an object of their own."""
    keys = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        if tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in given or ()
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
