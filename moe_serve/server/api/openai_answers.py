"""Answers of OpenAI's completions and chat, whole or as a stream, with their log probabilities.

The text of a token is what it decodes to by itself. Where a character has several tokens, each of them is U+FFFD.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.engine.output.logprobs import TokenLogprobs
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.generate import DONE, Call, Cursor, TextOf, texts_of
from moe_serve.server.api.openai_requests import CallOptions, ChatRequest, CompletionRequest
from moe_serve.server.api.parsed_output import Delta, NewOutput, OutputParser, merged, whole_message
from moe_serve.server.edge.errors import error_of, json_bytes
from moe_serve.server.requests.open_request import OpenRequest


class CompletionLogprobs:
    """Makes the `logprobs` of one choice of `/v1/completions`, piece by piece if it is streamed."""

    def __init__(self, text_of: TextOf):
        self._text_of = text_of
        self._offset = 0

    def of_prompt(self, request: OpenRequest) -> dict[str, list[Any]]:
        """Returns those of an echoed prompt. Its first token has none."""
        assert request.prompt_logprobs is not None
        first, *rest = request.spec.prompt_ids
        rest = rest[: len(request.prompt_logprobs)]  # fewer where the request was cut short
        part = self._part(rest, request.prompt_logprobs, 0, offset=len(self._text_of(first)))
        part["tokens"].insert(0, self._text_of(first))
        part["token_logprobs"].insert(0, None)
        part["top_logprobs"].insert(0, None)
        part["text_offset"].insert(0, 0)
        return part

    def of_output(self, request: OpenRequest, begin: int) -> dict[str, list[Any]]:
        """Returns those of the output from a token on."""
        assert request.output_logprobs is not None
        return self._part(request.matcher.output_ids[begin:], request.output_logprobs, begin, self._offset)

    def _part(self, ids: Sequence[int], entries: TokenLogprobs, begin: int, offset: int) -> dict[str, list[Any]]:
        tokens = [self._text_of(token_id) for token_id in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offset = offset
        places = range(begin, begin + len(ids))
        return {
            "tokens": tokens,
            "token_logprobs": [entries.logprob(i) for i in places],
            "top_logprobs": [
                {self._text_of(each.token_id): each.logprob for each in entries.at(i, token_id).values()}
                for i, token_id in zip(places, ids, strict=True)
            ],
            "text_offset": offsets,
        }


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns the log probabilities of two consecutive parts."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(request: OpenRequest, begin: int, text_of: TextOf) -> dict[str, Any]:
    """Returns the `logprobs` of one choice of `/v1/chat/completions`, of the output from a token on."""
    entries = request.output_logprobs
    assert entries is not None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(token_id, entries.logprob(i))
            | {"top_logprobs": [entry(each.token_id, each.logprob) for each in entries.top(i)]}
            for i, token_id in enumerate(request.matcher.output_ids[begin:], begin)
        ]
    }


def routed_experts(request: OpenRequest) -> dict[str, Any]:
    """Returns the field of an ended choice that holds the experts of prompt and output, if they were asked for."""
    if request.routed_experts is None or not request.is_done:
        return {}
    return {"routed_experts": request.routed_experts.as_json(request.num_routed)}


def prompt_logprobs(request: OpenRequest, text_of: TextOf) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: by token id, for each token of the prompt; null for the first."""
    entries = request.prompt_logprobs
    assert entries is not None
    return [
        None,
        *(
            {
                str(each.token_id): {
                    "logprob": each.logprob, "rank": each.rank, "decoded_token": text_of(each.token_id),
                }
                for each in entries.at(i, token_id).values()
            }
            for i, token_id in enumerate(request.spec.prompt_ids[1 : 1 + len(entries)])
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class Head:
    """The fields with which every object of one answer begins."""

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
    """Returns the token counts of a call. A prompt counts once, all of its samples count, left out or not.

    requests: count these only
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
    """Returns the end of a stream, with token counts if they were asked for. numbers: the counts; None = `usage`"""
    if not options.include_usage or any(request.failure is not None for request in call.requests):
        return DONE
    return event_of({**head.fields(kind), "choices": [], "usage": numbers or usage(call)}) + DONE


_KIND = "text_completion"
_COMPLETION_TAIL = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


class CompletionAnswers:
    """One choice for each sample of each prompt, in their order; see `generate.Answers`."""

    ends_at_failure = True

    def __init__(self, given: CompletionRequest, call: Call, model: str, tokenizer: Tokenizer | None):
        self._given = given
        self._options = given.options
        self._tokenizer = tokenizer
        self._text_of = texts_of(None if given.options.tokens_as_ids else tokenizer)
        self._head = Head.of(given.options, model)
        num_choices = len(call.requests)
        self._cursors = [Cursor() for _ in range(num_choices)]
        self._has_begun = [False] * num_choices
        self._logprobs = [CompletionLogprobs(self._text_of) for _ in range(num_choices)]
        # An event with text alone is written by parts: at 30,000 tokens per second every microsecond counts.
        start = json_bytes(self._head.fields(_KIND))[:-1]
        self._starts = [b'data: %s,"choices":[{"index":%d,"text":' % (start, i) for i in range(num_choices)]
        self._is_plain = not (
            given.echo or given.logprobs or given.options.continuous_usage or given.options.return_token_ids
        )

    def whole(self, call: Call) -> bytes:
        choices = [self._choice(i, request) for i, request in enumerate(call.requests)]
        return json_bytes({**self._head.fields(_KIND), "choices": choices, "usage": usage(call)})

    def event(self, call: Call, index: int) -> bytes:
        request = call.requests[index]
        if request.failure is not None:
            return failure_event(request)
        if self._is_plain and not request.is_done:
            text, _ = self._cursors[index].advance(request)
            return self._starts[index] + json_bytes(text) + _COMPLETION_TAIL if text else b""
        chunk = {**self._head.fields(_KIND), "choices": [self._choice(index, request)]}
        if self._options.continuous_usage:
            chunk["usage"] = usage(call, [request])
        return event_of(chunk)

    def end(self, call: Call) -> bytes:
        return stream_end(call, self._head, _KIND, self._options)

    def _choice(self, index: int, request: OpenRequest) -> dict[str, Any]:
        """Returns a choice with what is new."""
        begins, first_token = not self._has_begun[index], self._cursors[index].num_tokens
        self._has_begun[index] = True
        text, token_ids = self._cursors[index].advance(request)
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
        choice |= routed_experts(request)
        if self._options.return_token_ids:
            choice["token_ids"] = token_ids
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


_CHUNK = "chat.completion.chunk"
_CHAT_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


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
        self._cursors = [Cursor() for _ in range(num_choices)]  # what the parsers have
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
            choice |= routed_experts(request)
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
        first_token = self._cursors[index].num_tokens
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
            end = self._end_of(index, request) | routed_experts(request)
            events.append(self._chunk(call, index, {}, end, first_token))
        return b"".join(events)

    def end(self, call: Call) -> bytes:
        return stream_end(call, self._head, _CHUNK, self._options, self._usage(call))

    def _usage(self, call: Call) -> dict[str, Any]:
        """Returns the token counts, including those of the reasoning where they are known."""
        counts = [parser.reasoning_tokens() for parser in self._parsers]
        known = [count for count in counts if count is not None]
        details = {"completion_tokens_details": {"reasoning_tokens": sum(known)}} if known else {}
        return usage(call) | details

    def _push(self, call: Call, index: int) -> list[Delta]:
        """Feeds new output of a choice to its parser; returns the deltas of the message."""
        request = call.requests[index]
        return self._parsers[index].push(NewOutput(*self._cursors[index].advance(request), finish_reason(request)))

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
            return self._starts[index] + json_bytes(delta["content"]) + _CHAT_TAIL
        return event_of(self._fields(index, delta, {"finish_reason": None}))

    def _chunk(self, call: Call, index: int, delta: Delta, end: dict[str, Any], first_token: int) -> bytes:
        """first_token: index of the first output token that the client does not have"""
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
