"""`/v1/responses`: its body, which becomes the body of a chat and is then checked as one, and its answers as items.

Nothing is stored: a conversation is sent whole each time, and previous_response_id is refused. Fields that both routes
have, with those of vLLM and SGLang, keep their meaning.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from moe_serve.errors import RequestError
from moe_serve.server.api.generate import Call, Cursor
from moe_serve.server.api.messages import MAX_MESSAGES, Content, Message, Part, text_of
from moe_serve.server.api.openai_answers import finish_reason, usage
from moe_serve.server.api.openai_requests import ChatBody, ChatFields, ChatRequest, check_chat_of, response_format
from moe_serve.server.api.params import ResponseFormat
from moe_serve.server.api.parsed_output import Delta, NewOutput, OutputParser, field_of
from moe_serve.server.api.tool_fields import EXAMPLE, EXAMPLE_CHOICE, KINDS
from moe_serve.server.edge.body import Count, Name, OnlyFalse, OnlyZero, read_body
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest

_LOGPROBS = "message.output_text.logprobs"
_WORDS = (  # as of `in_words`
    (EXAMPLE, 'send {"type": "function", "name": "f", "parameters": {…}}'),
    (EXAMPLE_CHOICE, '{"type": "function", "name": "f"}'),
    ("].function.", "]."),
    ("].custom.", "]."),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)


class InputItem(msgspec.Struct):
    """A message, a call of a tool, its output, or the reasoning before them."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Name | None = None
    content: Content | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
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
    truncation: Annotated[Any, Meta(description="what does not fit is refused, not cut")] = None
    # Known in OpenAI's API, and not supported.
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
    checked = check_chat_of(_as_chat(given), "resp_", _WORDS)
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


def _as_chat(given: ResponseBody) -> ChatBody:
    """Returns the body of the equivalent chat. Raises RequestError."""
    return ChatBody(
        messages=_messages(given.instructions, given.input),
        tools=_tools(given.tools),
        tool_choice=_tool_choice(given.tool_choice),
        max_completion_tokens=given.max_output_tokens,
        response_format=None if given.text is None else response_format(given.text.format),
        reasoning_effort=None if given.reasoning is None else given.reasoning.effort,
        **{name: getattr(given, name) for name in _OF_CHATS},
    )


def _messages(instructions: str | None, given: str | list[InputItem]) -> list[Message]:
    """Returns the messages of a chat. Consecutive reasoning and calls form one message of the assistant."""
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
            case "custom_tool_call":
                name = _needed(f"{path}.name", item.name, "send the tool's")
                text = _needed(f"{path}.input", item.input, "send the text that the model has written")
                call = {"id": item.call_id, "type": "custom", "custom": {"name": name, "input": text}}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
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
    """Returns the assistant's message at the end, after adding one if needed."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _with_reasoning(messages: list[dict[str, Any]], message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message joined with the reasoning before it, which then is no message of its own."""
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
    """Returns tools as chats have them: the fields of each in an object of their own."""
    keys = ("name", "description", "parameters", "strict", "format")
    return [
        {"type": kind, kind: {key: tool[key] for key in keys if tool.get(key) is not None}}
        if (kind := tool.get("type")) in KINDS and kind not in tool
        else tool
        for tool in given or ()
    ]


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and (kind := given.get("type")) in KINDS and "name" in given:
        return {"type": kind, kind: {"name": given["name"]}}
    return given


Event = dict[str, Any]
_PREFIX = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}  # of calls


class ResponseAnswers:
    """The one answer of a call; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: ResponseRequest, model: str, parser: OutputParser):
        """model: its name on this server"""
        self._given = given
        self._model = model
        self._parser = parser
        self._created_s = int(time.time())
        self._cursor = Cursor()  # what the parser has
        self._num_events = 0
        self._items = _Items()

    def whole(self, call: Call) -> bytes:
        self._push(call.requests[0])
        return json_bytes(self._response(call))

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        events: list[Event] = []
        if not self._num_events:
            response = self._response(call, "in_progress")
            events += [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]
        if request.failure is not None:
            error = error_of(request.failure)["error"]
            failed = self._response(call, "failed") | {"error": {"code": "server_error", "message": error["message"]}}
            return self._sent([*events, {"type": "response.failed", "response": failed}])
        events += self._push(request)
        if request.is_done:
            response = self._response(call)
            kind = "completed" if response["status"] == "completed" else "incomplete"
            events.append({"type": f"response.{kind}", "response": response})
        return self._sent(events)

    def end(self, call: Call) -> bytes:
        return b""

    def _push(self, request: OpenRequest) -> list[Event]:
        """Hands what is new of the output to the parser, and returns the events of what that makes of it."""
        finish = finish_reason(request)
        events = [
            event
            for delta in self._parser.push(NewOutput(*self._cursor.advance(request), finish))
            for event in self._items.take(delta)
        ]
        return events + (self._items.close("completed" if finish == "stop" else "incomplete") if finish else [])

    def _sent(self, events: list[Event]) -> bytes:
        parts = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            parts.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json_bytes(numbered)))
            self._num_events += 1
        return b"".join(parts)

    def _response(self, call: Call, status: str | None = None) -> dict[str, Any]:
        """Returns the response so far. status: None = as the request ended"""
        request = call.requests[0]
        details = None
        if status is None:
            reason = finish_reason(request)
            status = {"stop": "completed", "length": "incomplete"}.get(reason or "", "cancelled")
            details = {"reason": "max_output_tokens"} if reason == "length" else None
        params = request.spec.params
        return {
            "id": self._given.chat.options.rid,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self._model,
            "output": list(self._items.done),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._given.echoed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None if status in ("in_progress", "failed") else self._usage(call),
        }

    def _usage(self, call: Call) -> dict[str, Any]:
        numbers = usage(call)
        return {
            "input_tokens": numbers["prompt_tokens"],
            "input_tokens_details": {**numbers["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": numbers["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens() or 0},
            "total_tokens": numbers["total_tokens"],
        }


class _Items:
    """The items of an output, one after the other, and the events that announce each change."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._call: object = None  # the index of the open call

    def take(self, delta: Delta) -> list[Event]:
        """Returns the events for a delta of the message."""
        if "tool_calls" in delta:
            return [event for call in delta["tool_calls"] for event in self._of_call(call)]
        kind, text = ("message", delta["content"]) if "content" in delta else ("reasoning", delta["reasoning"])
        events = [] if self._open is not None and self._open["type"] == kind else [*self.close(), *self._start(kind)]
        self._texts.append(text)
        name = "output_text" if kind == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"{name}.delta", content_index=0, delta=text, **more)]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item; returns the events for that."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._texts)
        item["status"] = status
        events = []
        if (kind := item["type"]) in _TEXTS:
            item[_TEXTS[kind]] = text
            more = {"name": item["name"]} if kind == "function_call" else {}
            events.append(self._event(f"{kind}_{_TEXTS[kind]}.done", **more, **{_TEXTS[kind]: text}))
        else:
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            part = _part(name, text)
            item["content"] = [part]
            more = {"logprobs": []} if name == "output_text" else {}
            events.append(self._event(f"{name}.done", content_index=0, text=text, **more))
            events.append(self._event("content_part.done", content_index=0, part=part))
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._open = self._call = None
        self._texts = []
        return events

    def _of_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        inner, field = field_of(call)
        kind = "custom_tool_call" if inner == "custom" else "function_call"
        if "id" in call:
            events += self.close()
            events += self._start(kind, **{"call_id": call["id"], "name": call[inner]["name"], field: ""})
            self._call = call["index"]
        text = call[inner][field]
        if text and self._call == call["index"]:
            self._texts.append(text)
            events.append(self._event(f"{kind}_{field}.delta", delta=text))
        return events

    def _start(self, kind: str, **fields: Any) -> list[Event]:
        item: dict[str, Any] = {"id": _PREFIX[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._open = item
        shown = dict(item)  # as it is now: the item changes
        events: list[Event] = [{"type": "response.output_item.added", "output_index": len(self.done), "item": shown}]
        if kind not in _TEXTS:
            part = _part("output_text" if kind == "message" else "reasoning_text", "")
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": f"response.{kind}", "item_id": self._open["id"], "output_index": len(self.done), **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
