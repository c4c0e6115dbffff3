"""What the answers of both OpenAI routes share: who answers, usage, why a request ended. Torch-free."""

import time
from dataclasses import dataclass
from typing import Any

from moe_serve.server.api.call_options import CallOptions
from moe_serve.server.api.generate import DONE, Call
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest


@dataclass(frozen=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    model: str
    created: int

    @classmethod
    def of(cls, options: CallOptions, model: str) -> "Head":
        """model: its name on this server"""
        return cls(options.rid, model, int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """kind: of the object, in OpenAI's words"""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(call: Call, requests: list[OpenRequest] | None = None) -> dict[str, Any]:
    """Returns the numbers of tokens of a call; a prompt counts once, however many samples it has, and all samples count
    from which the best were chosen.

    requests: only these
    """
    prompts: dict[int, OpenRequest] = {}
    of = [*call.requests, *call.left_out] if requests is None else requests
    for request in of:
        prompts.setdefault(id(request.spec.prompt_ids), request)
    num_prompt = sum(len(request.spec.prompt_ids) for request in prompts.values())
    num_output = sum(request.num_output for request in of)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_cached for request in prompts.values())},
    }


def finish_reason(request: OpenRequest) -> str | None:
    """Returns why a request ended, in OpenAI's words, and vLLM's "abort"; None while it runs."""
    reason = request.matcher.finish_reason
    return None if reason is None else reason.kind


def stop_reason(request: OpenRequest) -> int | str | None:
    """Returns the client's stop string or stop token id that ended a request, as vLLM does; None for all other ends."""
    reason = request.matcher.finish_reason
    if reason is None or reason.kind != "stop":
        return None
    is_clients = isinstance(reason.matched, str) or reason.matched in request.spec.params.stop_token_ids
    return reason.matched if is_clients else None


def event_of(value: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def failure_event(request: OpenRequest) -> bytes:
    """Returns the event of a request that failed after the stream began."""
    assert request.failure is not None
    return event_of(error_of(request.failure))


def stream_end(call: Call, head: Head, kind: str, options: CallOptions, numbers: dict[str, Any] | None = None) -> bytes:
    """Returns the end of a stream, with the numbers of tokens where they are asked for. numbers: None = `usage`"""
    if not options.include_usage or any(request.failure is not None for request in call.requests):
        return DONE
    return event_of({**head.fields(kind), "choices": [], "usage": numbers or usage(call)}) + DONE
