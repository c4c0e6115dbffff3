"""The messages of a chat, and the other input of a chat template."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moe_serve.errors import RequestError
from moe_serve.server.api.tool_fields import INPUT, MAX_TOOLS, as_functions
from moe_serve.server.edge.body import Body, Name, OnlyEmpty, OnlyOne, check_free_form, read_body, show

MAX_TEMPLATE_CHARS = 1 << 20
MAX_KWARGS = 32  # of chat_template_kwargs
MAX_MESSAGES = 1 << 14  # and tool calls in all of them; a template takes some 7 us for one
MAX_DOCUMENTS = 1 << 10

# Variables that the server sets: a client's variable of the same name would change their meaning.
_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
    "mask_token", "additional_special_tokens",
})  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class Part(msgspec.Struct):
    """A part of a message's content: text alone is served."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


Content = Annotated[str | list[str | Part], Meta(extra={"expected": "a string or a list of parts"})]


class Message(Body):
    """One message of a chat."""

    role: Annotated[Name, Meta(extra={"missing": "send system, user, assistant or tool"})]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    # Fields of earlier answers that clients send back; they mean nothing here.
    refusal: None = None
    audio: None = None
    annotations: OnlyEmpty | None = None
    function_call: None = None
    weight: OnlyOne | None = None


Messages = Annotated[
    list[Annotated[Message, Meta(extra={"noun": "message"})]],
    Meta(
        min_length=1,
        max_length=MAX_MESSAGES,
        extra={"missing": 'send a list such as [{"role": "user", "content": "hi"}]'},
    ),
]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)]
Template = Annotated[
    str, Meta(max_length=MAX_TEMPLATE_CHARS, description="only where the server trusts those of requests")
]
Kwargs = Annotated[dict[str, Any], Meta(max_length=MAX_KWARGS)]


@dataclass(frozen=True)
class ChatPrompt:
    """The input of a chat template.

    messages:               as templates read them: `content` is a text, arguments of tool calls are objects
    tools:                  functions; None = no tools
    chat_template:          the client's own; None = the model's
    add_generation_prompt:  the text ends with the beginning of an answer
    continue_final_message: the text ends with the last message, unfinished
    kwargs:                 more variables for the template, such as enable_thinking
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    kwargs: dict[str, Any]

    @property
    def continued(self) -> str | None:
        """The text of the last message if the output continues it."""
        return self.messages[-1]["content"] if self.continue_final_message else None


def chat_prompt(given: Any) -> ChatPrompt:
    """Returns the template's input from a body with these fields. Raises RequestError."""
    continues, asks = bool(given.continue_final_message), given.add_generation_prompt
    if continues and asks:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true, but the text cannot end in both ways; "
            "send one of them",
            field="continue_final_message",
        )
    for name in ("tools", "documents", "chat_template_kwargs"):
        check_free_form(name, getattr(given, name))
    kwargs = given.chat_template_kwargs or {}
    for key in kwargs:
        if not key.isidentifier() or key.startswith("_") or key in _RESERVED or len(key) > 64:
            name = "chat_template_kwargs"
            raise RequestError(f"{name}.{key[:64]} is not a variable that a client may set", field=name)
    if given.reasoning_effort is not None:
        kwargs = {"reasoning_effort": given.reasoning_effort, **kwargs}
    return ChatPrompt(
        messages=_messages(given.messages),
        tools=as_functions(given.tools),
        documents=given.documents or None,
        chat_template=given.chat_template,
        add_generation_prompt=not continues if asks is None else asks,
        continue_final_message=continues,
        add_special_tokens=bool(given.add_special_tokens),
        kwargs=kwargs,
    )


def _messages(given: list[Message]) -> list[dict[str, Any]]:
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(given)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    name = "messages[].tool_calls"
    if len(calls) > MAX_MESSAGES:
        raise RequestError(f"{name} has {len(calls)} entries, at most {MAX_MESSAGES} are taken; send fewer", field=name)
    check_free_form(name, calls)
    return messages


def _message(path: str, given: Message) -> dict[str, Any]:
    """Returns a message as templates read it."""
    message: dict[str, Any] = {"role": given.role, "content": text_of(f"{path}.content", given.content)}
    found = next(
        (text for text in (given.reasoning_content, given.reasoning, given.thinking) if text is not None), None
    )
    if found is not None:
        message |= {"reasoning_content": found, "thinking": found}  # gpt-oss' templates read the second
    # No empty values: templates test whether the key exists.
    if given.name:
        message["name"] = given.name
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        message["tool_calls"] = _tool_calls(f"{path}.tool_calls", given.tool_calls)
    return message


def text_of(path: str, content: str | list[str | Part] | None) -> str:
    """Returns the text of a content: itself, or that of its parts, one below the other. Raises RequestError."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join([_text_of_part(f"{path}[{i}]", part) for i, part in enumerate(content)])


def _text_of_part(path: str, part: str | Part) -> str:
    if isinstance(part, str):
        return part
    if part.type not in _TEXT_PARTS:
        raise RequestError(
            f"{path}.type is {show(part.type)}, but only text is served, no images, audio or files; send parts of type "
            "text",
            field=f"{path}.type",
        )
    key = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, key)
    if text is None:
        raise RequestError(f"{path}.{key} is missing, expected a string", field=f"{path}.{key}")
    return text


def _tool_calls(name: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checks the calls of an assistant's message; their arguments, JSON in a string, become objects."""
    checked = []
    for i, call in enumerate(calls):
        if call.get("type") == "custom":
            checked.append(_custom_call(f"{name}[{i}].custom", call))
            continue
        path = f"{name}[{i}].function"
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{path} is {show(function)}, expected an object with name and arguments", field=path)
        arguments = function.get("arguments")
        path = f"{path}.arguments"
        if isinstance(arguments, str):
            arguments = read_body(arguments.encode(), Any, path, may_be_empty=True)
        if not isinstance(arguments, dict | None):
            raise RequestError(f"{path} is {show(arguments)}, expected a JSON object in a string", field=path)
        checked.append({**call, "function": {**function, "arguments": arguments or {}}})
    return checked


def _custom_call(path: str, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the call of a custom tool as that of the function that models know."""
    custom = call.get("custom")
    name, text = (custom.get(key) if isinstance(custom, dict) else None for key in ("name", "input"))
    if not isinstance(name, str) or not isinstance(text, str):
        raise RequestError(f"{path} is {show(custom)}, expected an object with name and input", field=path)
    function = {"name": name, "arguments": {INPUT: text}}
    return {**{key: call[key] for key in call if key != "custom"}, "type": "function", "function": function}
