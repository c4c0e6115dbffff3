"""The process that renders chat templates: `python -m …_process PARENT_PID NICENESS`.

A template is a program from a model folder, and its input comes from clients. So it runs in jinja2's sandbox, in a
process of its own with bounded memory and CPU time. It may use all that transformers' `apply_chat_template` offers; a
test compares the two.
"""

import datetime
import functools
import json
import re
from typing import Any

import msgspec
from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moe_serve.server.workers.chat_template import Rendered, RenderJob
from moe_serve.server.workers.helper_process import serve_jobs, unbounded_time

_MAX_MEMORY_BYTES = 1 << 30
_MOST_COMPILED = 8  # templates that are kept compiled
# DeepSeek-R1's writes the calls of messages whose content is none, and no others; GLM-4.5's would write "None".
_ASKS_FOR_NONE = re.compile(r"""\bcontent(?:['"]\s*\])?\s+is\s+(?:not\s+)?none\b""")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends, to cut the text there


class _OutputTooLong(Exception):
    pass


def render(job: RenderJob) -> Rendered:
    """Returns the rendered text, or what is wrong with the template or its input."""
    try:
        if job.is_own:  # and is kept, so that it delays nobody again
            with unbounded_time():
                _compiled(job.template)
        try:
            return Rendered(_render(job))
        except TypeError:  # some templates, such as DeepSeek's, append the arguments of calls as text
            return Rendered(_render(_with_text_arguments(job)))
    except _OutputTooLong:
        return Rendered(
            None, f"the chat template makes more than {job.max_chars} characters of these messages; send less"
        )
    except MemoryError:
        return Rendered(None, "the chat template takes too much memory for these messages; send less")
    except RecursionError:
        return Rendered(None, "the chat template is nested too deeply for these messages; send less")
    except TemplateError as error:
        return Rendered(None, f"the chat template does not take these messages: {str(error)[:500]}")
    except Exception as error:  # a template is a program, and may fail in every way
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        return Rendered(None, f"the chat template fails on these messages ({reason})")


def _render(job: RenderJob) -> str:
    messages = _as_known_to(job.template, job.messages)
    continued = None
    if job.continue_final_message:
        continued = job.messages[-1]["content"]
        messages[-1]["content"] = continued + _TAG
    pieces, num_chars = [], 0
    template = _compiled(job.template)
    for piece in template.generate(
        messages=messages,
        tools=job.tools,
        documents=job.documents,
        add_generation_prompt=job.add_generation_prompt,
        **{**job.special_tokens, **job.kwargs},
    ):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > job.max_chars:
            raise _OutputTooLong
    text = "".join(pieces)
    return text if continued is None else _cut_at_tag(text, continued)


def _as_known_to(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages adapted to a template that would not know some role or value."""
    knows_developers = "developer" in template
    asks_for_none = _ASKS_FOR_NONE.search(template) is not None
    known = [dict(message) for message in messages]
    for message in known:
        if message["role"] == "developer" and not knows_developers:
            message["role"] = "system"
        if asks_for_none and "tool_calls" in message and not message["content"]:
            message["content"] = None
    return known


def _cut_at_tag(text: str, continued: str) -> str:
    """Returns the text up to the end of its last message, as transformers does."""
    if continued.strip() not in text or _TAG.strip() not in text:
        raise TemplateError("it does not write the last message as it is, so continue_final_message is not possible")
    end = text.rindex(_TAG.strip())
    keeps_spaces = text[end : end + len(_TAG)] == _TAG
    return text[:end] if keeps_spaces else text[:end].rstrip()


def _with_text_arguments(job: RenderJob) -> RenderJob:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}

    messages = [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in job.messages
    ]
    return msgspec.structs.replace(job, messages=messages)


@functools.lru_cache(_MOST_COMPILED)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Environment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    env.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # the type itself has more than is needed
    env.globals["namespace"] = _Namespace
    return env


class _Generation(Extension):
    """`{% generation %}` marks text of the assistant for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(Namespace):
    """jinja2's namespace without names that reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template has no {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not jinja2's own filter, which writes HTML's escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(data: bytes) -> bytes:
    """Returns the Rendered of a RenderJob; both as MessagePack."""
    return msgspec.msgpack.encode(render(msgspec.msgpack.decode(data, type=RenderJob)))


if __name__ == "__main__":
    serve_jobs(answer, _MAX_MEMORY_BYTES)
