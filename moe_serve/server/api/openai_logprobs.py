"""Log probabilities in the forms of OpenAI's two routes, and of vLLM's `prompt_logprobs`. Torch-free.

The text of a token is what it decodes to by itself. Where a character has several tokens, each of them is U+FFFD.
"""

from collections.abc import Callable, Sequence
from typing import Any

from moe_serve.engine.output.logprobs import TokenLogprobs
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.requests.open_request import OpenRequest

TextOf = Callable[[int], str]


def texts_of(tokenizer: Tokenizer | None) -> TextOf:
    """Returns a function from token ids to their texts; without a tokenizer to vLLM's "token_id:5"."""
    if tokenizer is None:
        return lambda token_id: f"token_id:{token_id}"
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            known[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
        return known[token_id]

    return text_of


class CompletionLogprobs:
    """The `logprobs` of one choice of `/v1/completions`, in parts where it is streamed. offset: characters so far"""

    def __init__(self, text_of: TextOf):
        self._text_of = text_of
        self._offset = 0

    def of_prompt(self, request: OpenRequest) -> dict[str, list[Any]]:
        """Returns those of the prompt, where it is echoed: nothing is known about its first token."""
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
    """Returns the log probabilities of two parts that follow each other."""
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
