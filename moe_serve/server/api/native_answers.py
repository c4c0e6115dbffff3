"""The answers of `/generate`, in SGLang's form. Torch-free."""

from dataclasses import dataclass
from typing import Any

from moe_serve.server.api.generate import DONE, Call
from moe_serve.server.api.native_logprobs import TextOf, of_output, of_prompt
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest

WEIGHT_VERSION = "default"  # weights do not change while serving


@dataclass
class Shown:
    """How much of a request a reader of increments has: characters and tokens."""

    num_chars: int = 0
    num_tokens: int = 0

    def rest(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns a result with only what the reader does not have, which it has from now on."""
        text, output_ids = answer["text"], answer["output_ids"]
        new = {**answer, "text": text[self.num_chars :], "output_ids": output_ids[self.num_tokens :]}
        self.num_chars, self.num_tokens = len(text), len(output_ids)
        return new


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


def result(request: OpenRequest, rid: str) -> dict[str, Any]:
    """Returns the `/generate` object of one request: everything so far, in a stream too (`text` is cumulative)."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": finish_reason(request),
        "prompt_tokens": len(request.spec.prompt_ids),
        "completion_tokens": request.num_output,
        "cached_tokens": request.num_cached,
        "weight_version": WEIGHT_VERSION,
        "dp_rank": request.rank,
    }
    if request.finished_s is not None:
        meta["e2e_latency"] = request.finished_s - request.submitted_s
    return {"text": request.matcher.text, "output_ids": request.matcher.output_ids, "meta_info": meta}


def finish_reason(request: OpenRequest) -> dict[str, Any] | None:
    """Returns why a request ended, None while it runs."""
    if request.failure is not None:
        return {"type": "abort", "message": str(request.failure)}
    reason = request.matcher.finish_reason
    if reason is None:
        return None
    if reason.kind == "abort":
        return {"type": "abort", "message": str(reason.matched)}
    if reason.kind == "length":
        return {"type": "length", "length": request.num_output}
    return {"type": "stop", "matched": reason.matched}
