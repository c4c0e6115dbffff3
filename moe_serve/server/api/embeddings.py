"""What is made of texts' vectors: `/v1/embeddings` of OpenAI; `/v1/rerank` of Jina and Cohere; `/score` of vLLM.

A vector is the last hidden row of the text's last token, as it is projected to logits, divided by its length: what vLLM
and SGLang give of a causal model. Two texts are as alike as the product of their vectors says, as in vLLM. How well
that serves a search is a matter of how the model was trained.
"""

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.generate import Call, WholeAnswers
from moe_serve.server.api.native import Priority, Timeout, first, prompts_of, salt_of
from moe_serve.server.api.openai_requests import Model, Noted
from moe_serve.server.edge.body import Body, Count, Name, OnlyEmpty, OnlyZero, TokenId, read_body
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.prompts import GenerateRequest, Prompt

Texts = Annotated[
    str | list[TokenId | str | list[TokenId]], Meta(extra={"missing": "send texts or lists of token ids"})
]
Given = tuple[str | None, list[int] | None]  # a text or token ids; the other is None
_PAIRED = (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2"))  # vLLM's names


class TextsBody(Body, kw_only=True):
    """What bodies have beside their texts, where nothing is generated."""

    model: Model | None = None
    add_special_tokens: bool | None = None
    user: Noted = None
    rid: Name | None = None
    request_id: Name | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    routed_dp_rank: Count | None = None
    # Known in vLLM's API, and not supported.
    truncate_prompt_tokens: None = None
    truncation_side: None = None
    mm_processor_kwargs: None = None

    def call(
        self, texts: Sequence[Given], params: SamplingParams, names: Sequence[str | None] | None = None
    ) -> GenerateRequest:
        """Returns the call for texts with these parameters. names: of their fields, for errors"""
        rid, special = first(self.rid, self.request_id), self.add_special_tokens is not False
        prompts = []
        for index, (text, ids) in enumerate(texts):
            own = rid if rid is None or len(texts) == 1 else f"{rid}-{index}"
            name = None if names is None else names[index]
            prompts.append(Prompt(text, ids, params, True, own, session_id=None, add_special_tokens=special, name=name))
        return GenerateRequest(
            prompts=tuple(prompts),
            stream=False,
            is_batch=True,
            salt=salt_of(self.cache_salt, self.extra_key),
            rank=self.routed_dp_rank,
            priority=self.priority or 0,
            timeout_s=self.timeout,
            incremental=None,
        )


class EmbeddingBody(TextsBody, kw_only=True):
    """Texts, or lists of token ids."""

    example: ClassVar[Mapping[str, Any]] = {"input": ["def read(", "class File:"]}

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(TextsBody, kw_only=True):
    """A query, and the documents that are to be sorted by their likeness to it. top_n: so many; 0 or null: all"""

    example: ClassVar[Mapping[str, Any]] = {"query": "read a file", "documents": ["def read(", "class File:"]}

    query: Annotated[str, Meta(extra={"missing": "send a text"})]
    documents: Annotated[list[str | Document], Meta(min_length=1, extra={"missing": "send a list of texts"})]
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: OnlyZero | None = None
    max_tokens_per_query: OnlyZero | None = None
    max_chunks_per_doc: None = None
    rank_fields: OnlyEmpty | None = None


class PairsBody(TextsBody, kw_only=True):
    """Texts, and those that each is compared with: one with each of several, or as many of both; in vLLM's names."""

    example: ClassVar[Mapping[str, Any]] = {"text_1": "read a file", "text_2": ["def read(", "class File:"]}

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    max_tokens_per_doc: OnlyZero | None = None
    max_tokens_per_query: OnlyZero | None = None
    instruction: None = None
    chat_template_kwargs: OnlyEmpty | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """One checked call of /v1/embeddings. in_base64: vectors are base64 of their float32 numbers, little-endian"""

    model: str | None
    in_base64: bool
    call: GenerateRequest


@dataclass(frozen=True)
class RerankRequest:
    """One checked call of /v1/rerank, whose first prompt is the query. documents: None: the answer has none"""

    model: str | None
    top_n: int | None
    documents: Sequence[str] | None
    call: GenerateRequest


@dataclass(frozen=True)
class PairsRequest:
    """One checked call of /score. num_first: prompts that come first, one or as many as the others"""

    model: str | None
    num_first: int
    call: GenerateRequest


_VECTOR = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, return_embedding=True)


def parse_embeddings(body: bytes, max_prompts: int) -> EmbeddingRequest:
    """Returns the checked request in a JSON body. max_prompts: the server can never hold a longer batch.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, EmbeddingBody)
    call = given.call(prompts_of("input", given.input, max_prompts), _VECTOR)
    return EmbeddingRequest(given.model, given.encoding_format == "base64", call)


def parse_rerank(body: bytes, max_prompts: int) -> RerankRequest:
    """Returns the checked request in a JSON body, as `parse_embeddings` does."""
    given = read_body(body, RerankBody)
    texts = [each if isinstance(each, str) else each.text for each in given.documents]
    documents = prompts_of("documents", texts, max_prompts)
    _check_sum(["query", "documents"], 1 + len(documents), max_prompts)
    names = ["query", *(None for _ in documents)]
    call = given.call([(given.query, None), *documents], _VECTOR, names)
    return RerankRequest(given.model, given.top_n or None, None if given.return_documents is False else texts, call)


def parse_pairs(body: bytes, max_prompts: int) -> PairsRequest:
    """Returns the checked request in a JSON body, as `parse_embeddings` does."""
    given = read_body(body, PairsBody)
    sides: list[list[Given]] = []
    names: list[str] = []
    for side in _PAIRED:
        found = [name for name in side if getattr(given, name) is not None]
        if len(found) != 1:
            what = f"{found[0]} and {found[1]} are both given; send one of them" if found else f"{side[0]} is missing"
            raise RequestError(what, field=found[1] if found else side[0])
        names += found
        sides.append(prompts_of(found[0], getattr(given, found[0]), max_prompts))
    _check_sum(names, sum(map(len, sides)), max_prompts)
    ones, others = map(len, sides)
    if ones not in (1, others):
        raise RequestError(
            f"{names[0]} has {ones} texts and {names[1]} has {others}; send one in {names[0]}, or as many in both",
            field=names[1],
        )
    of_each = [name for name, side in zip(names, sides, strict=True) for _ in side]
    return PairsRequest(given.model, ones, given.call([*sides[0], *sides[1]], _VECTOR, of_each))


def _check_sum(names: Sequence[str], num_texts: int, max_prompts: int) -> None:
    if num_texts > max_prompts:
        raise RequestError(
            f"{names[0]} and {names[1]} have {num_texts} texts together but at most {max_prompts} requests are held at "
            "a time (engine.max_running_requests x ranks + engine.max_queued_requests); send fewer at once",
            field=names[1],
        )


def names_pairs(body: bytes) -> bool:
    """Returns whether a JSON body has a field of pairs, which those of SGLang's scores have not or as null."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return any(bytes(fields[name]) != b"null" for name in _PAIRED[0] if name in fields)


class EmbeddingAnswers(WholeAnswers[EmbeddingRequest]):
    """The vectors of all texts; see `generate.Answers`."""

    def whole(self, call: Call) -> bytes:
        data = []
        for index, row in enumerate(_vectors_of(call)):
            value = base64.b64encode(row.tobytes()).decode() if self._given.in_base64 else row.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        return json_bytes({"object": "list", "data": data, "model": self._name, "usage": _usage_of(call)})


class RerankAnswers(WholeAnswers[RerankRequest]):
    """The documents of a call, the likeliest one first."""

    def whole(self, call: Call) -> bytes:
        query, *documents = _vectors_of(call)
        scores = [_likeness(query, row) for row in documents]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self._given.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if self._given.documents is not None:
            for result in results:
                result["document"] = {"text": self._given.documents[result["index"]]}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": self._name}
        return json_bytes({**head, "usage": _usage_of(call), "results": results})


class PairsAnswers(WholeAnswers[PairsRequest]):
    """How alike the texts of each pair are."""

    def whole(self, call: Call) -> bytes:
        rows, num_first = _vectors_of(call), self._given.num_first
        others = rows[num_first:]
        firsts = rows[:num_first] if num_first == len(others) else rows[:1] * len(others)
        data = [
            {"index": index, "object": "score", "score": _likeness(*pair)}
            for index, pair in enumerate(zip(firsts, others, strict=True))
        ]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": self._name}
        return json_bytes({**head, "data": data, "usage": _usage_of(call)})


def _vectors_of(call: Call) -> list[np.ndarray]:
    vectors = []
    for request in call.requests:
        assert request.embedding is not None, "each has come with the first token"
        vectors.append(unit_vector(request.embedding))
    return vectors


def _likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the product of two vectors, which rounding may have made a little longer than 1."""
    return min(1.0, max(-1.0, float(np.dot(one.astype(np.float64), other))))


def _usage_of(call: Call) -> dict[str, int]:
    num_tokens = sum(len(request.spec.prompt_ids) for request in call.requests)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def unit_vector(row: bytes) -> np.ndarray:
    """Returns float32 numbers, little-endian, divided by the length of their vector; zeros stay zeros."""
    numbers = np.frombuffer(row, "<f4").astype(np.float64)
    length = float(np.sqrt(np.square(numbers).sum()))
    return (numbers / (length or 1.0)).astype("<f4")
