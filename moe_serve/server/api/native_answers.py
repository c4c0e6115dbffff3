"""The answers of `/generate`, in SGLang's form, with their log probabilities.

The first prompt token of an answer has null instead of a log probability, and null instead of a list.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_serve.engine.output.logprobs import Logprob, TokenLogprobs
from moe_serve.server.api.generate import DONE, Call
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest

_AT_ONCE = 4096  # places that are encoded in one go, so that a long answer leaves time for others

TextOf = Callable[[int], str | None]


def no_text(token_id: int) -> None:
    """Stands for the text of each token where a client does not ask for it."""


def of_prompt(request: OpenRequest, text_of: TextOf) -> dict[str, msgspec.Raw]:
    """Returns the fields of `meta_info` about the prompt, as far as it is computed; no entries if it did not ask."""
    entries, spec = request.prompt_logprobs, request.spec
    if entries is None:
        none = TokenLogprobs(spec.params.logprobs or 0, spec.params.logprob_token_ids)
        return _fields("input", none, [], text_of, 0)
    start = spec.params.prompt_logprobs_start
    return _fields("input", entries, spec.prompt_ids[start : start + 1 + len(entries)], text_of, 0, has_first=True)


def of_output(request: OpenRequest, text_of: TextOf, begin: int = 0) -> dict[str, msgspec.Raw]:
    """Returns the fields of `meta_info` about the output from token `begin` on."""
    entries = request.output_logprobs
    assert entries is not None, "it asks for none"
    return _fields("output", entries, request.matcher.output_ids, text_of, begin)


def _fields(
    name: str, entries: TokenLogprobs, ids: Sequence[int], text_of: TextOf, begin: int, has_first: bool = False
) -> dict[str, msgspec.Raw]:
    """has_first: the first of ids has no entry"""
    behind = int(has_first)

    def own(i: int) -> list[Any]:
        return [None if i < behind else entries.logprob(i - behind), ids[i], text_of(ids[i])]

    def listed(find: Callable[[int], list[Logprob]]) -> Callable[[int], list[list[Any]] | None]:
        def at(i: int) -> list[list[Any]] | None:
            if i < behind:
                return None
            return [[each.logprob, each.token_id, text_of(each.token_id)] for each in find(i - behind)]

        return at

    places = range(begin, len(ids))
    found = {f"{name}_token_logprobs": _encoded(own, places)}
    if entries.num_top:
        found[f"{name}_top_logprobs"] = _encoded(listed(entries.top), places)
    if entries.token_ids:
        found[f"{name}_token_ids_logprobs"] = _encoded(listed(entries.of_ids), places)
    return found


def _encoded(make: Callable[[int], Any], places: range) -> msgspec.Raw:
    def parts() -> Iterator[bytes]:
        for first in range(0, len(places), _AT_ONCE):
            yield msgspec.json.encode([make(i) for i in places[first : first + _AT_ONCE]])[1:-1]

    return msgspec.Raw(b"[" + b",".join(parts()) + b"]")


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
        results = [self._result(request, rid) for request, rid in zip(call.requests, call.client_ids, strict=True)]
        return json_bytes(results if self._is_batch else results[0])

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        chunk: dict[str, Any]
        if request.failure is not None:
            chunk = error_of(request.failure)
        else:
            shown = None if self._shown is None else self._shown[index]
            chunk = self._result(request, call.client_ids[index], shown)
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
