"""The answers of `/v1/responses`: a chat's message as items, in JSON and as OpenAI's events."""

import time
import uuid
from typing import Any

from moe_serve.server.api.generate import Call
from moe_serve.server.api.openai_answers import finish_reason, usage
from moe_serve.server.api.parsed_output import Delta, NewOutput, OutputParser
from moe_serve.server.api.response_request import ResponseRequest
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest

Event = dict[str, Any]
_PREFIX = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class ResponseAnswers:
    """The one answer of a call; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: ResponseRequest, model: str, parser: OutputParser):
        """model: its name on this server"""
        self._given = given
        self._model = model
        self._parser = parser
        self._created_s = int(time.time())
        self._num_chars = self._num_tokens = 0  # that the parser has
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
        text = request.matcher.text[self._num_chars :]
        token_ids = request.matcher.output_ids[self._num_tokens :]
        self._num_chars += len(text)
        self._num_tokens += len(token_ids)
        finish = finish_reason(request)
        events = [
            event
            for delta in self._parser.push(NewOutput(text, token_ids, finish))
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
        """Returns the object of the response so far. status: None = as the request ended"""
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
    """The items of an output: one after the other, each with the events that say what is new of it."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._call: object = None  # the index of the open call

    def take(self, delta: Delta) -> list[Event]:
        """Returns the events of what is new of a message."""
        if "tool_calls" in delta:
            return [event for call in delta["tool_calls"] for event in self._of_call(call)]
        kind, text = ("message", delta["content"]) if "content" in delta else ("reasoning", delta["reasoning"])
        events = [] if self._open is not None and self._open["type"] == kind else [*self.close(), *self._start(kind)]
        self._texts.append(text)
        name = "output_text" if kind == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"{name}.delta", content_index=0, delta=text, **more)]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item, and returns the events that say so."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._texts)
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._event("function_call_arguments.done", name=item["name"], arguments=text))
        else:
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            part = _part(name, text)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            events.append(self._event(f"{name}.done", content_index=0, text=text, **more))
            events.append(self._event("content_part.done", content_index=0, part=part))
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._open = self._call = None
        self._texts = []
        return events

    def _of_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if "id" in call:
            events += self.close()
            fields = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            events += self._start("function_call", **fields)
            self._call = call["index"]
        arguments = call["function"]["arguments"]
        if arguments and self._call == call["index"]:
            self._texts.append(arguments)
            events.append(self._event("function_call_arguments.delta", delta=arguments))
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
        if kind != "function_call":
            part = _part("output_text" if kind == "message" else "reasoning_text", "")
            events.append(self._event("content_part.added", content_index=0, part=part))
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": f"response.{kind}", "item_id": self._open["id"], "output_index": len(self.done), **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}
