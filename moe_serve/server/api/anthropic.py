"""`/v1/messages` of Anthropic's API: its body, which becomes that of a chat and is checked as one, and its answers.

Form: docs.claude.com/en/api/messages. What tells Anthropic something and changes no answer here, such as cache_control,
is taken; tools that its servers run are refused. A conversation is sent whole each time, as there.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from moe_serve.attention_dp.request import MAX_SEED
from moe_serve.errors import RequestError
from moe_serve.server.api.generate import Call, Cursor
from moe_serve.server.api.messages import MAX_MESSAGES, Content, Message, Tools, text_of
from moe_serve.server.api.openai_answers import finish_reason, stop_reason, usage
from moe_serve.server.api.openai_requests import ChatBody, ChatRequest, Model, Noted, check_chat_of, response_format
from moe_serve.server.api.params import Stops, Temperature, TopK, TopP
from moe_serve.server.api.parsed_output import Delta, NewOutput, OutputParser
from moe_serve.server.api.tool_fields import EXAMPLE, EXAMPLE_CHOICE
from moe_serve.server.edge.body import Body, Name, OnlyEmpty, read_body, show
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest

_EXAMPLE_TOOL = 'send {"name": "f", "input_schema": {…}}'
_WORDS = (  # as of `in_words`
    (EXAMPLE, _EXAMPLE_TOOL),
    (EXAMPLE_CHOICE, '{"type": "tool", "name": "f"}'),
    ("].function.parameters", "].input_schema"),
    ("].function.", "]."),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("max_completion_tokens", "max_tokens"),
    ("reasoning_effort", "output_config.effort"),
)


class Block(msgspec.Struct):
    """A part of a message: text, thinking, a call of a tool, or its result."""

    type: Name
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Content | None = None


class InputMessage(msgspec.Struct):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], Meta(extra={"expected": "a string or a list of blocks"})]


class ToolChoice(Body, kw_only=True):
    """Whether tools may, must or must not be called. name: of the tool, where type is tool"""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks before its answer, where its chat template lets a call choose."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Noted = None


class OutputConfig(msgspec.Struct):
    """format: {"type": "json_schema", "schema": …};  effort: a word for the chat template"""

    format: dict[str, Any] | None = None
    effort: Name | None = None


class CountTokensBody(Body, kw_only=True):
    """A call of /v1/messages/count_tokens: the input of /v1/messages."""

    other_words: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "input": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "max_completion_tokens": "max_tokens",
        "max_new_tokens": "max_tokens",
    }
    example: ClassVar[Mapping[str, Any]] = {"model": "demo", "messages": [{"role": "user", "content": "def "}]}

    model: Model | None = None
    messages: Annotated[
        list[InputMessage],
        Meta(
            min_length=1,
            max_length=MAX_MESSAGES,
            extra={"missing": 'send a list such as [{"role": "user", "content": "hi"}]'},
        ),
    ]
    system: Content | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    cache_control: Noted = None
    context_management: Noted = None
    mcp_servers: OnlyEmpty | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """A call of /v1/messages."""

    example: ClassVar[Mapping[str, Any]] = {**(CountTokensBody.example or {}), "max_tokens": 16}

    max_tokens: Annotated[
        int, Meta(ge=1, le=MAX_SEED, extra={"missing": "send the most tokens that the answer may have"})
    ]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Noted = None
    service_tier: Noted = None
    inference_geo: Noted = None
    speed: Noted = None
    container: None = None


def parse_messages(body: bytes) -> ChatRequest:
    """Returns the checked chat in a JSON body of /v1/messages.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, MessagesBody)
    return _checked(
        given,
        max_completion_tokens=given.max_tokens,
        stop=given.stop_sequences,
        stream=given.stream,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
    )


def parse_count(body: bytes) -> ChatRequest:
    """Returns the checked chat in a JSON body of /v1/messages/count_tokens; raises as `parse_messages`."""
    return _checked(read_body(body, CountTokensBody))


def _checked(given: CountTokensBody, **fields: Any) -> ChatRequest:
    """Returns the checked chat. fields: more of `ChatBody`"""
    choice, config = given.tool_choice, given.output_config or OutputConfig()
    chat = ChatBody(
        model=given.model,
        messages=_messages(given),
        tools=_tools(given.tools or []),
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        response_format=response_format(given.output_format or config.format),
        reasoning_effort=config.effort,
        chat_template_kwargs=None if given.thinking is None else _thinking(given.thinking),
        continue_final_message=given.messages[-1].role == "assistant",
        **fields,
    )
    return check_chat_of(chat, "msg_", _WORDS)


def _thinking(given: Thinking) -> dict[str, Any]:
    """Returns the variables by which chat templates let a call choose: Qwen's and GLM's name, and DeepSeek's."""
    return dict.fromkeys(("enable_thinking", "thinking"), given.type != "disabled")


def _choice(given: ToolChoice) -> str | dict[str, Any]:
    """Returns tool_choice as chats have it. Raises RequestError."""
    if given.type != "tool":
        return {"any": "required"}.get(given.type, given.type)
    if given.name is None:
        raise RequestError("tool_choice.name is missing; send that of the tool", field="tool_choice.name")
    return {"type": "function", "function": {"name": given.name}}


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools as chats have them. Raises RequestError for one that Anthropic defines: models know none here."""
    tools = []
    for i, tool in enumerate(given):
        path = f"tools[{i}]"
        if (kind := tool.get("type") or "custom") != "custom":
            raise RequestError(
                f"{path}.type is {show(kind)}, but only tools with a schema of their own are served; {_EXAMPLE_TOOL}",
                f"{path}.type",
            )
        if not isinstance(tool.get("input_schema"), dict):
            what = show(tool["input_schema"]) if "input_schema" in tool else "missing"
            raise RequestError(f"{path}.input_schema is {what}, expected a JSON schema", f"{path}.input_schema")
        function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tools


def _messages(given: CountTokensBody) -> list[Message]:
    """Returns the messages of a chat: results of tools are messages of their own, before the text beside them."""
    messages = [] if given.system is None else [Message(role="system", content=text_of("system", given.system))]
    for i, message in enumerate(given.messages):
        path = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(path, message.content))
        else:
            messages += _others(path, message.role, message.content)
    return messages


def _assistant(path: str, blocks: list[Block]) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_needed(f"{path}[{i}].text", block.text))
            case "thinking":
                thoughts.append(_needed(f"{path}[{i}].thinking", block.thinking))
            case "redacted_thinking":
                pass  # of another server's model, which nobody else can read
            case "tool_use":
                name = _needed(f"{path}[{i}].name", block.name)
                call = {"name": name, "arguments": json_bytes(block.input or {}).decode()}
                calls.append({"id": block.id, "type": "function", "function": call})
            case _:
                raise _not_served(f"{path}[{i}]", block)
    return Message(
        role="assistant",
        content="\n".join(texts),
        reasoning_content="\n".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _others(path: str, role: str, blocks: list[Block]) -> list[Message]:
    texts, results = [], []
    for i, block in enumerate(blocks):
        match block.type:
            case "text":
                texts.append(_needed(f"{path}[{i}].text", block.text))
            case "tool_result":
                text = text_of(f"{path}[{i}].content", block.content)
                call_id = _needed(f"{path}[{i}].tool_use_id", block.tool_use_id)
                results.append(Message(role="tool", tool_call_id=call_id, content=text))
            case _:
                raise _not_served(f"{path}[{i}]", block)
    return [*results, Message(role=role, content="\n".join(texts))] if texts or not results else results


def _needed(path: str, value: str | None) -> str:
    if value is None:
        raise RequestError(f"{path} is missing, expected a string", field=path)
    return value


def _not_served(path: str, block: Block) -> RequestError:
    return RequestError(
        f"{path}.type is {show(block.type)}, but text, thinking, tool_use and tool_result are served, no images or "
        "documents; leave it out",
        field=f"{path}.type",
    )


Event = dict[str, Any]


class MessagesAnswers:
    """The one answer of a call; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: ChatRequest, model: str, parser: OutputParser):
        """model: its name on this server"""
        self._given = given
        self._model = model
        self._parser = parser
        self._cursor = Cursor()  # what the parser has
        self._blocks = _Blocks()
        self._has_begun = False

    def whole(self, call: Call) -> bytes:
        request = call.requests[0]
        self._push(request)
        return json_bytes(self._message(call) | self._ending(request))

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            events.append({"type": "message_start", "message": self._message(call)})
        if request.failure is not None:
            return _sent([*events, error_of(request.failure)])
        events += self._push(request)
        if request.is_done:
            events += [
                {"type": "message_delta", "delta": self._ending(request), "usage": _usage(call)},
                {"type": "message_stop"},
            ]
        return _sent(events)

    def end(self, call: Call) -> bytes:
        return b""

    def _push(self, request: OpenRequest) -> list[Event]:
        """Hands what is new of the output to the parser, and returns the events of what that makes of it."""
        finish = finish_reason(request)
        deltas = self._parser.push(NewOutput(*self._cursor.advance(request), finish))
        events = [event for delta in deltas for event in self._blocks.take(delta)]
        return events + (self._blocks.close() if finish else [])

    def _message(self, call: Call) -> dict[str, Any]:
        """Returns the message so far, as of a request that has not ended."""
        return {
            "id": self._given.options.rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks.done),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(call),
        }

    def _ending(self, request: OpenRequest) -> dict[str, Any]:
        """Returns why the message ended; null for one that was aborted."""
        matched = stop_reason(request)
        reason = {"stop": "end_turn", "length": "max_tokens"}.get(finish_reason(request) or "")
        if reason == "end_turn" and isinstance(matched, str):
            reason = "stop_sequence"
        elif reason == "end_turn" and self._blocks.has_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}


def _usage(call: Call) -> dict[str, Any]:
    """Returns the token counts of a call; those of the prompt that were cached are no input tokens in this API."""
    numbers = usage(call)
    cached = numbers["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": numbers["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": numbers["completion_tokens"],
    }


def _sent(events: list[Event]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json_bytes(event)) for event in events)


class _Blocks:
    """The blocks of an output, one after the other, and the events that announce each change."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.has_call = False
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._call: object = None  # the index of the open call

    def take(self, delta: Delta) -> list[Event]:
        """Returns the events for a delta of the message."""
        if "tool_calls" in delta:
            return [event for call in delta["tool_calls"] for event in self._of_call(call)]
        kind, text = ("text", delta["content"]) if "content" in delta else ("thinking", delta["reasoning"])
        more = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        is_open = self._open is not None and self._open["type"] == kind
        events = [] if is_open else [*self.close(), self._start({"type": kind, **more})]
        return [*events, self._delta(f"{kind}_delta", kind, text)]

    def close(self) -> list[Event]:
        """Ends the open block; returns the event for that. Arguments that were cut short are left out."""
        block = self._open
        if block is None:
            return []
        text = "".join(self._texts)
        if block["type"] == "tool_use":
            try:
                block["input"] = msgspec.json.decode(text or "{}")
            except msgspec.DecodeError:
                block["input"] = {}
        else:
            block[block["type"]] = text
        self.done.append(block)
        self._open = self._call = None
        self._texts = []
        return [{"type": "content_block_stop", "index": len(self.done) - 1}]

    def _of_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if "id" in call:
            events += self.close()
            events.append(
                self._start({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
            )
            self._call, self.has_call = call["index"], True
        arguments = call["function"]["arguments"]
        if arguments and self._call == call["index"]:
            events.append(self._delta("input_json_delta", "partial_json", arguments))
        return events

    def _start(self, block: dict[str, Any]) -> Event:
        self._open = block
        return {"type": "content_block_start", "index": len(self.done), "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.done), "delta": {"type": kind, field: text}}
