"""The answers of `/v1/completions`. Torch-free."""

from typing import Any

from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.completion_request import CompletionRequest
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
from moe_serve.server.api.openai_logprobs import CompletionLogprobs, joined, prompt_logprobs, texts_of
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.open_request import OpenRequest

_KIND = "text_completion"
_TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


class CompletionAnswers:
    """One choice for each sample of each prompt, in their order; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: CompletionRequest, call: Call, model: str, tokenizer: Tokenizer | None):
        self._given = given
        self._options = given.options
        self._tokenizer = tokenizer
        self._text_of = texts_of(tokenizer)
        self._head = Head.of(given.options, model)
        num_choices = len(call.requests)
        self._num_chars = [0] * num_choices  # of each choice's output, that the client has
        self._num_tokens = [0] * num_choices
        self._has_begun = [False] * num_choices
        self._logprobs = [CompletionLogprobs(self._text_of) for _ in range(num_choices)]
        # An event with text alone is written by parts: at 30,000 tokens per second every microsecond counts.
        start = json_bytes(self._head.fields(_KIND))[:-1]
        self._starts = [b'data: %s,"choices":[{"index":%d,"text":' % (start, i) for i in range(num_choices)]
        self._is_plain = not (
            given.echo or given.logprobs or given.options.continuous_usage or given.options.return_token_ids
        )

    def whole(self, call: Call) -> bytes:
        choices = [self._choice(i, request, request.matcher.text) for i, request in enumerate(call.requests)]
        return json_bytes({**self._head.fields(_KIND), "choices": choices, "usage": usage(call)})

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        if request.failure is not None:
            return failure_event(request)
        text = request.matcher.text[self._num_chars[index] :]
        self._num_chars[index] += len(text)
        if self._is_plain and not request.is_done:
            return self._starts[index] + json_bytes(text) + _TAIL if text else b""
        chunk = {**self._head.fields(_KIND), "choices": [self._choice(index, request, text)]}
        if self._options.continuous_usage:
            chunk["usage"] = usage(call, [request])
        return event_of(chunk)

    def end(self, call: Call) -> bytes:
        return stream_end(call, self._head, _KIND, self._options)

    def _choice(self, index: int, request: OpenRequest, text: str) -> dict[str, Any]:
        """Returns a choice with what is new of it. text: of the output"""
        begins, first_token = not self._has_begun[index], self._num_tokens[index]
        self._has_begun[index], self._num_tokens[index] = True, request.num_output
        echoes = begins and self._given.echo
        logprobs = None
        if self._given.logprobs:
            logprobs = self._logprobs[index].of_prompt(request) if echoes else None
            output = self._logprobs[index].of_output(request, first_token)
            logprobs = output if logprobs is None else joined(logprobs, output)
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(index, request) + text if echoes else text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(request),
            "stop_reason": stop_reason(request),
        }
        if self._given.prompt_logprobs and begins:
            choice["prompt_logprobs"] = prompt_logprobs(request, self._text_of)
        if self._options.return_token_ids:
            choice["token_ids"] = request.matcher.output_ids[first_token:]
            if begins:
                choice["prompt_token_ids"] = request.spec.prompt_ids
        return choice

    def _prompt_text(self, index: int, request: OpenRequest) -> str:
        """Returns the text of a choice's prompt, as the client sent it or as its tokens decode."""
        prompt = self._given.call.prompts[index // self._options.taken.params.n]
        if prompt.text is not None:
            return prompt.text
        skips = request.spec.params.skip_special_tokens
        return "" if self._tokenizer is None else self._tokenizer.decode(request.spec.prompt_ids, skips)
