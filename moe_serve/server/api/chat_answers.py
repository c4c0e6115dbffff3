"""The answers of `/v1/chat/completions`. Torch-free."""

from collections.abc import Callable
from typing import Any

from moe_serve.server.api.chat_request import ChatRequest
from moe_serve.server.api.generate import Call
from moe_serve.server.api.openai_answers import (
    Head,
    event_of,
    failure_event,
    finish_reason,
    stop_reason,
    stream_end,
    usage,
)
from moe_serve.server.api.openai_logprobs import TextOf, chat_logprobs
from moe_serve.server.api.output_parser import Delta, NewOutput, OutputParser, merged, whole_message
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.open_request import OpenRequest

_CHUNK = "chat.completion.chunk"
_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatAnswers:
    """One choice for each sample; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(
        self, given: ChatRequest, call: Call, model: str, text_of: TextOf, make_parser: Callable[[], OutputParser]
    ):
        """text_of: of a token, for log probabilities;  make_parser: of the output of one choice"""
        num_choices = len(call.requests)
        self._options = given.options
        self._text_of = text_of
        self._has_logprobs = given.logprobs
        self._head = Head.of(given.options, model)
        self._parsers = [make_parser() for _ in range(num_choices)]
        self._num_chars = [0] * num_choices  # of each choice, that its parser has
        self._num_tokens = [0] * num_choices
        self._has_begun = [False] * num_choices
        # An event with content alone is written by parts: at 30,000 tokens per second every microsecond counts.
        start = json_bytes(self._head.fields(_CHUNK))[:-1]
        self._starts = [b'data: %s,"choices":[{"index":%d,"delta":{"content":' % (start, i) for i in range(num_choices)]
        self._is_plain = not (given.logprobs or given.options.continuous_usage or given.options.return_token_ids)

    def whole(self, call: Call) -> bytes:
        choices = []
        for index, request in enumerate(call.requests):
            message = whole_message(self._push(call, index))
            choice = {"index": index, "message": message, "logprobs": None, **self._end_of(index, request)}
            if self._has_logprobs:
                choice["logprobs"] = chat_logprobs(request, 0, self._text_of)
            if self._options.return_token_ids:
                choice["token_ids"] = request.matcher.output_ids
            choices.append(choice)
        answer = {**self._head.fields("chat.completion"), "choices": choices, "usage": self._usage(call)}
        if self._options.return_token_ids:
            answer["prompt_token_ids"] = call.requests[0].spec.prompt_ids
        return json_bytes(answer)

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        if request.failure is not None:
            return failure_event(request)
        first_token = self._num_tokens[index]
        deltas = self._push(call, index)
        events = []
        if not self._has_begun[index]:
            self._has_begun[index] = True
            events.append(self._begin(call, index))
        if self._is_plain:
            events += [self._plain(index, delta) for delta in deltas]
        elif deltas or not request.is_done:
            events.append(self._chunk(call, index, merged(deltas), {"finish_reason": None}, first_token))
            first_token = request.num_output
        if request.is_done:
            events.append(self._chunk(call, index, {}, self._end_of(index, request), first_token))
        return b"".join(events)

    def end(self, call: Call) -> bytes:
        return stream_end(call, self._head, _CHUNK, self._options, self._usage(call))

    def _usage(self, call: Call) -> dict[str, Any]:
        """Returns the numbers of tokens, those of the reasoning among them where they are known."""
        counts = [parser.reasoning_tokens() for parser in self._parsers]
        known = [count for count in counts if count is not None]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(known)}} if known else {}
        return usage(call) | details

    def _push(self, call: Call, index: int) -> list[Delta]:
        """Hands what is new of a choice to its parser, and returns what that makes of it."""
        request = call.requests[index]
        text = request.matcher.text[self._num_chars[index] :]
        token_ids = request.matcher.output_ids[self._num_tokens[index] :]
        self._num_chars[index] += len(text)
        self._num_tokens[index] += len(token_ids)
        return self._parsers[index].push(NewOutput(text, token_ids, finish_reason(request)))

    def _end_of(self, index: int, request: OpenRequest) -> dict[str, Any]:
        reason = finish_reason(request)
        assert reason is not None
        return {"finish_reason": self._parsers[index].finish_reason(reason), "stop_reason": stop_reason(request)}

    def _begin(self, call: Call, index: int) -> bytes:
        """Returns the first chunk of a choice."""
        chunk = self._fields(index, {"role": "assistant", "content": ""}, {"finish_reason": None})
        if self._options.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = call.requests[0].spec.prompt_ids
        return event_of(chunk)

    def _plain(self, index: int, delta: Delta) -> bytes:
        if len(delta) == 1 and "content" in delta:
            return self._starts[index] + json_bytes(delta["content"]) + _TAIL
        return event_of(self._fields(index, delta, {"finish_reason": None}))

    def _chunk(self, call: Call, index: int, delta: Delta, end: dict[str, Any], first_token: int) -> bytes:
        """first_token: the first one of the output that the client does not have"""
        chunk, request = self._fields(index, delta, end), call.requests[index]
        if first_token < request.num_output:
            if self._options.return_token_ids:
                chunk["choices"][0]["token_ids"] = request.matcher.output_ids[first_token:]
            if self._has_logprobs:
                chunk["choices"][0]["logprobs"] = chat_logprobs(request, first_token, self._text_of)
        if self._options.continuous_usage:
            chunk["usage"] = usage(call, [request])
        return event_of(chunk)

    def _fields(self, index: int, delta: Delta, end: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, **end}
        return {**self._head.fields(_CHUNK), "choices": [choice]}
