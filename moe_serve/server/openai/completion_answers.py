"""The answers of `/v1/completions`. Torch-free."""

from typing import Any

from moe_serve.server.generate import Call, json_bytes
from moe_serve.server.openai.answers import (
    Head,
    event_of,
    failure_event,
    finish_reason,
    stop_reason,
    stream_end,
    usage,
)
from moe_serve.server.openai.completion_request import CompletionRequest

_KIND = "text_completion"
_TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


class CompletionAnswers:
    """One choice for each sample of each prompt, in their order; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: CompletionRequest, call: Call, model: str):
        self._options = given.options
        self._head = Head.of(given.options, model)
        self._num_chars = [0] * len(call.requests)  # of each choice, that the client has
        self._num_tokens = [0] * len(call.requests)
        # An event with text alone is written by parts: at 30,000 tokens per second every microsecond counts.
        start = json_bytes(self._head.fields(_KIND))[:-1]
        self._starts = [b'data: %s,"choices":[{"index":%d,"text":' % (start, i) for i in range(len(call.requests))]
        self._is_plain = not (given.options.continuous_usage or given.options.return_token_ids)

    def whole(self, call: Call) -> bytes:
        choices = [self._choice(call, i, request.matcher.text, 0) for i, request in enumerate(call.requests)]
        return json_bytes({**self._head.fields(_KIND), "choices": choices, "usage": usage(call)})

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        if request.failure is not None:
            return failure_event(request)
        text = request.matcher.text[self._num_chars[index] :]
        self._num_chars[index] += len(text)
        if self._is_plain and not request.is_done:
            return self._starts[index] + json_bytes(text) + _TAIL if text else b""
        chunk = {**self._head.fields(_KIND), "choices": [self._choice(call, index, text, self._num_tokens[index])]}
        self._num_tokens[index] = request.num_output
        if self._options.continuous_usage:
            chunk["usage"] = usage(call, [request])
        return event_of(chunk)

    def end(self, call: Call) -> bytes:
        return stream_end(call, self._head, _KIND, self._options)

    def _choice(self, call: Call, index: int, text: str, first_token: int) -> dict[str, Any]:
        request = call.requests[index]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason(request),
            "stop_reason": stop_reason(request),
        }
        if self._options.return_token_ids:
            choice["token_ids"] = request.matcher.output_ids[first_token:]
            if first_token == 0:
                choice["prompt_token_ids"] = request.spec.prompt_ids
        return choice
