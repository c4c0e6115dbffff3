"""Checks the messages of a chat, and what else a chat template is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.errors import RequestError
from moe_serve.server.edge.json_fields import Fields, boolean, parse_nested_object, short_name, show

MAX_DEPTH = 64  # of lists and objects in a body: a JSON schema may be one of its values
MAX_TEMPLATE_CHARS = 1 << 20
MAX_KWARGS = 32  # of chat_template_kwargs
MAX_MESSAGES = 1 << 14  # and tool calls in all of them; a template takes some 7 us for one
MAX_DOCUMENTS = 1 << 10
MAX_VALUES = 1 << 16  # nested in one field; the event loop takes some 0.1 us to make an object of one

# What a template is given by the server: a client's variable of the same name would change what the others mean.
_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
    "mask_token", "additional_special_tokens",
})  # fmt: skip
# What clients send back of an answer, without a meaning for the next one.
_NEUTRAL_OF_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "weight": (1,),
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat template makes a text from.

    messages:               as templates read them: `content` is a text, arguments of tool calls are objects
    tools:                  as the client sent them; None = no tools
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
        """The text of the last message where the output goes on with it."""
        return self.messages[-1]["content"] if self.continue_final_message else None


def take_chat_prompt(values: Fields) -> ChatPrompt:
    """Takes the fields that a prompt is made from. Raises RequestError with the field and what was expected."""
    messages = values.take("messages", _messages)
    if messages is None:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "hi"}]', "messages")
    continues = bool(values.take("continue_final_message", boolean))
    asks = values.take("add_generation_prompt", boolean)
    if continues and asks:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true, but the text cannot end in both ways; "
            "send one of them",
            field="continue_final_message",
        )
    kwargs = values.take("chat_template_kwargs", _kwargs) or {}
    effort = values.take("reasoning_effort", short_name)
    if effort is not None:
        kwargs = {"reasoning_effort": effort, **kwargs}
    return ChatPrompt(
        messages=messages,
        tools=values.take("tools", _objects) or None,
        documents=values.take("documents", _documents) or None,
        chat_template=values.take("chat_template", _template),
        add_generation_prompt=not continues if asks is None else bool(asks),
        continue_final_message=continues,
        add_special_tokens=bool(values.take("add_special_tokens", boolean)),
        kwargs=kwargs,
    )


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a list of messages", field=name)
    _check_number(name, len(value), MAX_MESSAGES)
    messages = [_message(f"{name}[{i}]", item) for i, item in enumerate(value)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    _check_number(f"{name}[].tool_calls", len(calls), MAX_MESSAGES)
    _check_values(f"{name}[].tool_calls", calls)
    return messages


def _check_number(name: str, num: int, most: int) -> None:
    if num > most:
        raise RequestError(f"{name} has {num} entries, at most {most} are taken; send fewer", field=name)


def _check_values(name: str, value: Any) -> None:
    """Raises RequestError where lists and objects hold too many values, at any depth."""
    num, waiting = 0, [value]
    while waiting and num <= MAX_VALUES:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            num += len(inner)
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)
    if num > MAX_VALUES:
        raise RequestError(f"{name} has more than {MAX_VALUES} values in lists and objects; send fewer", field=name)


def _documents(name: str, value: Any) -> list[dict[str, Any]]:
    documents = _objects(name, value)
    _check_number(name, len(documents), MAX_DOCUMENTS)
    _check_values(name, documents)
    return documents


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object with role and content", field=name)
    fields = Fields(value, f"{name}.", _NEUTRAL_OF_MESSAGE, {})
    role = fields.take("role", short_name)
    if role is None:
        raise RequestError(f"{name}.role is missing; send system, user, assistant or tool", field=f"{name}.role")
    message: dict[str, Any] = {"role": role, "content": fields.take("content", _content) or ""}
    reasoning = [fields.take(key, _string) for key in ("reasoning_content", "reasoning", "thinking")]
    found = next((text for text in reasoning if text is not None), None)
    if found is not None:
        message |= {"reasoning_content": found, "thinking": found}  # gpt-oss' templates read the second
    for key, check in (("name", _string), ("tool_call_id", _string), ("tool_calls", _tool_calls)):
        if given := fields.take(key, check):  # templates ask whether there is one, so not of an empty list
            message[key] = given
    fields.refuse_the_rest()
    return message


def _content(name: str, value: Any) -> str:
    """Returns the text of a content: itself, or that of its parts, one below the other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a string or a list of parts", field=name)
    return "\n".join([_text_of_part(f"{name}[{i}]", part) for i, part in enumerate(value)])


def _text_of_part(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{name} is {show(part)}, expected an object with type and text", field=name)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{name}.type is {show(kind)}, but only text is served, no images, audio or files; send parts of type text",
            field=f"{name}.type",
        )
    key = "refusal" if kind == "refusal" else "text"
    return _string(f"{name}.{key}", part.get(key))


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Checks the calls of an assistant's message; their arguments, JSON in a string, become objects."""
    calls = _objects(name, value)
    for i, call in enumerate(calls):
        path = f"{name}[{i}].function"
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{path} is {show(function)}, expected an object with name and arguments", field=path)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_nested_object(arguments.encode(), MAX_DEPTH) if arguments.strip() else {}
            except RequestError as error:
                message = str(error).replace("the body", f"{path}.arguments")
                raise RequestError(message, field=f"{path}.arguments") from None
        if not isinstance(arguments, dict | None):
            path = f"{path}.arguments"
            raise RequestError(f"{path} is {show(arguments)}, expected a JSON object in a string", field=path)
        calls[i] = {**call, "function": {**function, "arguments": arguments or {}}}
    return calls


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {show(value)}, expected a list of objects", field=name)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"{name}[{i}] is {show(item)}, expected an object", field=f"{name}[{i}]")
    return list(value)


def _kwargs(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object", field=name)
    _check_number(name, len(value), MAX_KWARGS)
    _check_values(name, value)
    for key in value:
        if not key.isidentifier() or key.startswith("_") or key in _RESERVED or len(key) > 64:
            raise RequestError(f"{name}.{key[:64]} is not a variable that a client may set", field=name)
    return value


def _template(name: str, value: Any) -> str:
    text = _string(name, value)
    if len(text) > MAX_TEMPLATE_CHARS:
        raise RequestError(f"{name} has {len(text)} characters, at most {MAX_TEMPLATE_CHARS} are taken", field=name)
    return text


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} is {show(value)}, expected a string", field=name)
    return value
