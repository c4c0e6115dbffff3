"""`/v1/score` in SGLang's form: how probable each of some tokens is behind each of several texts. Nothing is generated.

A text is the query and an item, joined before they are tokenized; with token ids both are. A score is the probability
of a label token among all tokens, or, with apply_softmax, among the labels. So a model that answers yes or no ranks
documents: the template of the question is the caller's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from moe_serve.attention_dp.sampling_params import MAX_LOGPROB_IDS, SamplingParams
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.server.api.embeddings import TextsBody
from moe_serve.server.api.generate import Call, WholeAnswers
from moe_serve.server.api.native import is_batch, prompts_of
from moe_serve.server.edge.body import TokenId, read_body
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.prompts import GenerateRequest, check_ids, check_num_chars

MAX_REPEATED = 2**21  # characters or tokens of the query in all prompts of a call: 16 MB of ids
_Label = Annotated[TokenId, Meta(ge=0)]


class ScoreBody(TextsBody, kw_only=True):
    """A query, and items that each follow it, all as texts or all as token ids."""

    example: ClassVar[Mapping[str, Any]] = {
        "query": "Is this about files? ", "items": ["open(path)", "sum(values)"], "label_token_ids": [5, 6],
    }  # fmt: skip

    query: Annotated[str | list[TokenId], Meta(extra={"missing": "send a text or a list of token ids"})]
    items: Annotated[
        str | list[TokenId | str | list[TokenId]], Meta(extra={"missing": "send texts or lists of token ids"})
    ]
    label_token_ids: Annotated[
        list[_Label],
        Meta(min_length=1, max_length=MAX_LOGPROB_IDS, extra={"missing": "send the ids of the tokens to score"}),
    ]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    # Names of pairs of texts, which another form has: as null they say nothing.
    text_1: None = None
    text_2: None = None
    queries: None = None
    documents: None = None
    data_1: None = None
    data_2: None = None


@dataclass(frozen=True)
class ScoreRequest:
    """One checked call of /v1/score. softmax: scores of an item add up to 1"""

    model: str | None
    softmax: bool
    call: GenerateRequest


def parse_score(body: bytes, max_prompts: int, limits: ModelLimits, tokenizer: Tokenizer | None) -> ScoreRequest:
    """Returns the checked request in a JSON body. max_prompts: the server can never hold a longer batch.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, ScoreBody)
    items = prompts_of("items", given.items, max_prompts)
    is_text = isinstance(given.query, str)
    if is_text != (items[0][0] is not None):
        kind = "a text" if is_text else "token ids"
        raise RequestError(f"query is {kind} and items are not; send all as texts, or all as token ids", field="items")
    if not isinstance(given.query, str):
        check_ids("query", given.query, limits)
        for index, (_, item_ids) in enumerate(items):
            check_ids(f"items[{index}]" if is_batch(given.items) else "items", item_ids or [], limits)
    elif tokenizer is not None:
        check_num_chars("query", given.query, tokenizer, limits)
    repeated = (len(items) - 1) * len(given.query)
    if repeated > MAX_REPEATED:
        kind = "characters" if is_text else "tokens"
        raise RequestError(
            f"query has {len(given.query)} {kind}, which each of {len(items)} items repeats, at most {MAX_REPEATED} "
            "in one call; send fewer items at once",
            field="items",
        )
    params = SamplingParams(
        max_new_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=tuple(given.label_token_ids)
    )
    item_first = bool(given.item_first)
    texts = [(_joined(given.query, text, item_first), _joined(given.query, ids, item_first)) for text, ids in items]
    return ScoreRequest(given.model, bool(given.apply_softmax), given.call(texts, params))


def _joined(query: Any, item: Any, item_first: bool) -> Any:
    """Returns both in their order; None where the item is not in this form."""
    if item is None:
        return None
    return item + query if item_first else query + item


class ScoreAnswers(WholeAnswers[ScoreRequest]):
    """The scores of all items; see `generate.Answers`."""

    def whole(self, call: Call) -> bytes:
        scores = []
        for request in call.requests:
            entries = request.output_logprobs
            assert entries is not None, "every item asks for them"
            scores.append(scores_of([each.logprob for each in entries.of_ids(0)], self._given.softmax))
        num_tokens = sum(len(request.spec.prompt_ids) for request in call.requests)
        usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
        return json_bytes({"object": "scoring", "model": self._name, "scores": scores, "usage": usage})


def scores_of(logprobs: Sequence[float], softmax: bool) -> list[float]:
    """Returns the probabilities of log probabilities; with softmax divided by their sum."""
    largest = max(logprobs) if softmax else 0.0
    found = [math.exp(each - largest) for each in logprobs]
    total = sum(found) if softmax else 1.0
    return [each / total for each in found]
