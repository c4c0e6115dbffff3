"""The answers of `/generate`, in SGLang's form. Torch-free."""

from typing import Any

from moe_serve.server.answers import Shown, error_of, result
from moe_serve.server.generate import DONE, Call, json_bytes


class NativeAnswers:
    """An object for each request, or a list of them; see `generate.Answers`."""

    ends_at_failure = False

    def __init__(self, call: Call, is_batch: bool, incremental: bool):
        """is_batch: the answer is a list;  incremental: events hold only what is new, not all text and ids again"""
        self._is_batch = is_batch
        self._shown = [Shown() for _ in call.requests] if incremental else None

    def whole(self, call: Call) -> bytes:
        results = [result(request, rid) for request, rid in zip(call.requests, call.rids, strict=True)]
        return json_bytes(results if self._is_batch else results[0])

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        chunk: dict[str, Any]
        if request.failure is not None:
            chunk = error_of(request.failure)
        else:
            chunk = result(request, call.rids[index])
            if self._shown is not None:
                chunk = self._shown[index].rest(chunk)
        if self._is_batch:
            chunk["index"] = index
        return b"data: " + json_bytes(chunk) + b"\n\n"

    def end(self, call: Call) -> bytes:
        return DONE
