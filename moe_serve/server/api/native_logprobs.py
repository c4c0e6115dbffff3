"""Log probabilities in SGLang's form: a list of [log probability, token id, text or null] for each place. Torch-free.

The first prompt token of an answer has null instead of a log probability, and null instead of a list.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from moe_serve.engine.output.logprobs import Logprob, TokenLogprobs
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.requests.open_request import OpenRequest

_AT_ONCE = 4096  # places that are encoded in one go, so that a long answer leaves time for others

TextOf = Callable[[int], str | None]


def no_text(token_id: int) -> None:
    """Stands for the text of each token where a client does not ask for it."""


def texts_of(tokenizer: Tokenizer) -> TextOf:
    """Returns a function from token ids to their texts, each decoded by itself and once."""
    known: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in known:
            known[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
        return known[token_id]

    return text_of


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
