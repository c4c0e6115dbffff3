"""`/v1/embeddings` of OpenAI: one vector for each text. `/v1/rerank` of Jina and Cohere: documents by their likeness.

A vector is the last hidden row of the text's last token, as it is projected to logits, divided by its length: what vLLM
and SGLang give of a causal model. Two texts are as alike as the product of their vectors says, as in vLLM. How well
that serves a search is a matter of how the model was trained.
"""

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.server.api.generate import Call, WholeAnswers
from moe_serve.server.api.native import Priority, Timeout, prompts_of, salt_of
from moe_serve.server.api.openai_requests import Model, Noted
from moe_serve.server.edge.body import Body, Count, Name, TokenId, read_body
from moe_serve.server.edge.errors import json_bytes
from moe_serve.server.requests.prompts import GenerateRequest, Prompt


class _TextsBody(Body, kw_only=True):
    """What both bodies have beside their texts."""

    model: Model | None = None
    add_special_tokens: bool | None = None
    user: Noted = None
    rid: Name | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    routed_dp_rank: Count | None = None


class EmbeddingBody(_TextsBody, kw_only=True):
    """Texts, or lists of token ids."""

    example: ClassVar[Mapping[str, Any]] = {"input": ["def read(", "class File:"]}

    input: Annotated[
        str | list[TokenId | str | list[TokenId]], Meta(extra={"missing": "send texts or lists of token ids"})
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None


class RerankBody(_TextsBody, kw_only=True):
    """A query, and the documents that are to be sorted by their likeness to it. top_n: so many; 0 or null: all"""

    example: ClassVar[Mapping[str, Any]] = {"query": "read a file", "documents": ["def read(", "class File:"]}

    query: Annotated[str, Meta(extra={"missing": "send a text"})]
    documents: Annotated[list[str], Meta(min_length=1, extra={"missing": "send a list of texts"})]
    top_n: Count | None = None
    return_documents: bool | None = None


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


def parse_embeddings(body: bytes, max_prompts: int) -> EmbeddingRequest:
    """Returns the checked request in a JSON body. max_prompts: the server can never hold a longer batch.

    Raises RequestError with the field, its value and what was expected.
    """
    given = read_body(body, EmbeddingBody)
    call = _call_of(given, prompts_of("input", given.input, max_prompts))
    return EmbeddingRequest(given.model, given.encoding_format == "base64", call)


def parse_rerank(body: bytes, max_prompts: int) -> RerankRequest:
    """Returns the checked request in a JSON body, as `parse_embeddings` does."""
    given = read_body(body, RerankBody)
    documents = prompts_of("documents", given.documents, max_prompts - 1)
    shown = None if given.return_documents is False else given.documents
    call = _call_of(given, [(given.query, None), *documents], first="query")
    return RerankRequest(given.model, given.top_n or None, shown, call)


def _call_of(
    given: _TextsBody, texts: Sequence[tuple[str | None, list[int] | None]], first: str | None = None
) -> GenerateRequest:
    """Returns the call for the vectors of texts. first: the field of the first text, where it has another"""
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, return_embedding=True)
    special = given.add_special_tokens is not False
    prompts = []
    for index, (text, ids) in enumerate(texts):
        rid = given.rid if given.rid is None or len(texts) == 1 else f"{given.rid}-{index}"
        name = first if index == 0 else None
        prompts.append(Prompt(text, ids, params, True, rid, session_id=None, add_special_tokens=special, name=name))
    return GenerateRequest(
        prompts=tuple(prompts),
        stream=False,
        is_batch=True,
        salt=salt_of(given.cache_salt, given.extra_key),
        rank=given.routed_dp_rank,
        priority=given.priority or 0,
        timeout_s=given.timeout,
        incremental=None,
    )


class EmbeddingAnswers(WholeAnswers):
    """The vectors of all texts; see `generate.Answers`."""

    def __init__(self, given: EmbeddingRequest, name: str):
        """name: of the served model"""
        self._given = given
        self._name = name

    def whole(self, call: Call) -> bytes:
        data = []
        for index, row in enumerate(_vectors_of(call)):
            value = base64.b64encode(row.tobytes()).decode() if self._given.in_base64 else row.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        return json_bytes({"object": "list", "data": data, "model": self._name, "usage": _usage_of(call)})


class RerankAnswers(WholeAnswers):
    """The documents of a call, the likeliest one first."""

    def __init__(self, given: RerankRequest, name: str):
        """name: of the served model"""
        self._given_documents, self._top_n = given.documents, given.top_n
        self._name = name

    def whole(self, call: Call) -> bytes:
        query, *documents = _vectors_of(call)
        scores = [float(np.dot(query.astype(np.float64), row)) for row in documents]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self._top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if self._given_documents is not None:
            for result in results:
                result["document"] = {"text": self._given_documents[result["index"]]}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": self._name}
        return json_bytes({**head, "usage": _usage_of(call), "results": results})


def _vectors_of(call: Call) -> list[np.ndarray]:
    vectors = []
    for request in call.requests:
        assert request.embedding is not None, "each has come with the first token"
        vectors.append(unit_vector(request.embedding))
    return vectors


def _usage_of(call: Call) -> dict[str, int]:
    num_tokens = sum(len(request.spec.prompt_ids) for request in call.requests)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def unit_vector(row: bytes) -> np.ndarray:
    """Returns float32 numbers, little-endian, divided by the length of their vector; zeros stay zeros."""
    numbers = np.frombuffer(row, "<f4").astype(np.float64)
    length = float(np.sqrt(np.square(numbers).sum()))
    return (numbers / (length or 1.0)).astype("<f4")
