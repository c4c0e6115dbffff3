"""The answers of `/generate`, in SGLang's form. Torch-free."""

from typing import Any

from moe_serve.server.answers import Shown, error_of, result
from moe_serve.server.generate import DONE, Call, json_bytes
from moe_serve.server.native.native_logprobs import TextOf, of_output, of_prompt
from moe_serve.server.open_request import OpenRequest


class NativeAnswers:
    """An object for each request, or a list of them; see `generate.Answers`."""

    ends_at_failure = False

    def __init__(self, call: Call, is_batch: bool, incremental: bool, text_of: TextOf):
        """is_batch: the answer is a list;  incremental: events hold only what is new, not all text and ids again

        text_of: texts of tokens beside their log probabilities
        """
        self._is_batch = is_batch
        self._shown = [Shown() for _ in call.requests] if incremental else None
        self._text_of = text_of

    def whole(self, call: Call) -> bytes:
        results = [self._result(request, rid) for request, rid in zip(call.requests, call.rids, strict=True)]
        return json_bytes(results if self._is_batch else results[0])

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        chunk: dict[str, Any]
        if request.failure is not None:
            chunk = error_of(request.failure)
        else:
            shown = None if self._shown is None else self._shown[index]
            chunk = self._result(request, call.rids[index], shown)
            if shown is not None:
                chunk = shown.rest(chunk)
        if self._is_batch:
            chunk["index"] = index
        return b"data: " + json_bytes(chunk) + b"\n\n"

    def _result(self, request: OpenRequest, rid: str, shown: Shown | None = None) -> dict[str, Any]:
        """Returns the object of a request. shown: what its reader has, who gets only new log probabilities"""
        found = result(request, rid)
        if request.output_logprobs is not None and request.spec.shows_logprobs:
            begin = 0 if shown is None else shown.num_tokens
            if not begin:  # those of the prompt are complete by now
                found["meta_info"] |= of_prompt(request, self._text_of)
            found["meta_info"] |= of_output(request, self._text_of, begin)
        return found

    def end(self, call: Call) -> bytes:
        return DONE
