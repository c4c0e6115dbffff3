"""`/v1/embeddings` as OpenAI's own client reads it, and what is made of its vectors: rerank and score."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from msgspec import structs

from moe_serve.errors import RequestError
from moe_serve.server.api.embeddings import (
    EmbeddingAnswers,
    EmbeddingRequest,
    _likeness,
    parse_pairs,
    parse_rerank,
    unit_vector,
)
from tests.server.api.calls import TEXT, post
from tests.server.fake_worker import LIMITS
from tests.server.served import in_event_loop, serving


@in_event_loop
async def test_each_text_has_a_vector_of_length_1():
    async with serving(1) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.client.base_url}/v1", api_key="none", max_retries=0)
        texts = await client.embeddings.create(model="demo", input=["def read(", "class"])  # it asks for base64
        ids = await client.embeddings.create(model="demo", input=[5, 6, 7], encoding_format="float")
        prompts = [submit.prompt_ids for submit in served.workers[0].submitted]
    assert prompts == [TEXT.encode("def read("), TEXT.encode("class"), [5, 6, 7]]
    # A fake rank gives a row of 3 and 4 times the length of the prompt.
    for answer, lengths in ((texts, map(len, prompts[:2])), (ids, [3])):
        for index, (each, length) in enumerate(zip(answer.data, lengths, strict=True)):
            norm = (9 + 16 * length**2) ** 0.5
            assert each.embedding == pytest.approx([3 / norm, 4 * length / norm])
            assert (each.index, each.object) == (index, "embedding")
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == len(prompts[0]) + len(prompts[1])
    assert (texts.object, texts.model) == ("list", "demo")


@in_event_loop
async def test_documents_are_sorted_by_the_product_of_their_vector_with_that_of_the_query():
    fields = {"model": "demo", "query": "def", "documents": ["def read(self, size)", "class", "def"]}
    async with serving(1) as served:
        whole = (await post(served, "/v1/rerank", **fields)).json()
        two = (await post(served, "/v1/rerank", **fields, top_n=2, return_documents=False)).json()
    lengths = [len(TEXT.encode(text)) for text in (fields["query"], *fields["documents"])]
    query, *rows = [(3 / (9 + 16 * n * n) ** 0.5, 4 * n / (9 + 16 * n * n) ** 0.5) for n in lengths]
    scores = [query[0] * row[0] + query[1] * row[1] for row in rows]
    order = sorted(range(3), key=lambda index: (-scores[index], index))
    assert [result["index"] for result in whole["results"]] == order
    assert order[0] != 0, "the longest document is the least like the query"
    assert [result["relevance_score"] for result in whole["results"]] == pytest.approx([scores[i] for i in order])
    assert [result["document"]["text"] for result in whole["results"]] == [fields["documents"][i] for i in order]
    assert whole["usage"]["total_tokens"] == sum(lengths)
    assert [set(result) for result in two["results"]] == [{"index", "relevance_score"}] * 2


@in_event_loop
async def test_documents_may_be_objects_and_the_routes_of_cohere_and_vllm_are_served():
    fields = {"query": "def", "documents": [{"text": "def read(self"}, "class"]}
    async with serving(1) as served:
        answers = [(await post(served, path, **fields)).json() for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    for answer in answers:
        assert answer["results"] == answers[0]["results"]
        assert {result["document"]["text"] for result in answer["results"]} == {"def read(self", "class"}


def likeness(one: str, other: str) -> float:
    rows = [(3.0, 4.0 * len(TEXT.encode(text))) for text in (one, other)]
    lengths = [sum(x * x for x in row) ** 0.5 for row in rows]
    return sum(x * y for x, y in zip(*rows, strict=True)) / (lengths[0] * lengths[1])


@in_event_loop
async def test_a_text_is_scored_against_each_of_others_and_two_lists_pair_by_pair():
    """As vLLM does, with its names."""
    one, others = "def", ["def read(self, size)", "class"]
    async with serving(1) as served:
        first = (await post(served, "/score", model="demo", text_1=one, text_2=others)).json()
        same = [
            (await post(served, path, **fields)).json()["data"]
            for path in ("/score", "/v1/score")
            for fields in ({"queries": one, "documents": others}, {"queries": [one], "items": others},
                           {"data_1": one, "data_2": others})
        ]  # fmt: skip
        pairs = (await post(served, "/score", text_1=others, text_2=others[::-1])).json()
        single = (await post(served, "/v1/score", text_1=[5, 6], text_2=[[7]])).json()
        label = {"query": "a", "items": ["b"], "label_token_ids": [5]}
        neutral = await post(served, "/v1/score", text_1=None, queries=None, **label)
    assert [each["score"] for each in first["data"]] == pytest.approx([likeness(one, other) for other in others])
    assert [(each["index"], each["object"]) for each in first["data"]] == [(0, "score"), (1, "score")]
    assert (first["object"], first["model"]) == ("list", "demo")
    assert first["usage"]["prompt_tokens"] == sum(len(TEXT.encode(text)) for text in (one, *others))
    assert all(data == first["data"] for data in same)
    assert [each["score"] for each in pairs["data"]] == pytest.approx([likeness(*others)] * 2)
    assert len(single["data"]) == 1
    assert "scores" in neutral.json(), "a null says nothing of the form"


WRONG = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", [5]]}, "input[1]"),
    ({"input": [5, 2048]}, "input"),
    ({"input": "a", "dimensions": 64}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a" * 1_000_000}, "input"),
    ({"input": "a", "stream": True}, "stream"),
]
WRONG_RERANK = [
    ({"query": "a"}, "documents"),
    ({"query": "a", "documents": []}, "documents"),
    ({"query": ["a"], "documents": ["b"]}, "query"),
    ({"query": "a", "documents": ["b", 5]}, "documents[1]"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ({"query": "", "documents": ["b"]}, "query"),
    ({"query": "a", "documents": [""]}, "documents"),
    ({"query": "a" * 1_000_000, "documents": ["b"]}, "query"),
    ({"query": "a" * 1_000, "documents": ["b"]}, "query"),
    ({"query": "a", "documents": [{"image": "b"}]}, "documents[0].text"),
]
WRONG_PAIRS = [
    ({"text_1": "a"}, "text_2"),
    ({"text_2": "a"}, "text_1"),
    ({"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
    ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    ({"text_1": "a", "text_2": ["b", [5]]}, "text_2[1]"),
    ({"text_1": "a", "text_2": ["b" * 1_000_000]}, "text_2"),
    ({"queries": "a" * 1_000, "documents": "b"}, "queries"),
    ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]


def test_texts_of_both_sides_are_counted_together_and_the_limit_is_the_true_one():
    for parse, fields in (
        (parse_rerank, {"query": "a", "documents": ["b"] * 3}),
        (parse_pairs, {"text_1": ["a"] * 2, "text_2": ["b"] * 2}),
        (parse_pairs, {"text_1": "a", "text_2": ["b"] * 3}),
    ):
        body = json.dumps(fields).encode()
        parse(body, max_prompts=4)
        with pytest.raises(RequestError, match="have 4 texts together but at most 3 requests") as caught:
            parse(body, max_prompts=3)
        assert caught.value.field == list(fields)[1]


def test_a_text_is_not_more_like_itself_than_1():
    rows = [unit_vector(np.float32([1.0 / n, 0.3, n]).tobytes()) for n in range(1, 50)]
    assert max(_likeness(row, row) for row in rows) == 1.0


@in_event_loop
async def test_a_wrong_field_is_named():
    async with serving() as served:
        tables = {"/v1/embeddings": WRONG, "/v1/rerank": WRONG_RERANK, "/score": WRONG_PAIRS}
        calls = [(path, *each) for path, table in tables.items() for each in table]
        for path, fields, param in calls:
            response = await post(served, path, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert (await post(served, "/v1/embeddings", model="x", input="a")).status_code == 404


@in_event_loop
async def test_a_call_is_bounded_by_the_numbers_of_its_vectors():
    async with serving(1, limits=structs.replace(LIMITS, embedding_size=2**20)) as served:
        for path, field, fields in (("embeddings", "input", {}), ("rerank", "documents", {"query": "a"})):
            taken, refused = [["a"] * count for count in ((2, 3) if path == "embeddings" else (1, 2))]
            assert (await post(served, f"/v1/{path}", **{field: taken}, **fields)).status_code == 200
            response = await post(served, f"/v1/{path}", **{field: refused}, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert "at most 2 are given" in error["message"]
        assert len(served.workers[0].submitted) == 4


@in_event_loop
async def test_many_vectors_are_written_beside_the_event_loop(monkeypatch):
    threads = []
    monkeypatch.setattr(EmbeddingAnswers, "whole", lambda *_: threads.append(threading.current_thread()) or b"{}")
    monkeypatch.setattr("tests.server.fake_worker.embedding_of", lambda submit: bytes(4 * len(submit.prompt_ids) * 64))
    async with serving(1) as served:
        for length in (4, 100):
            assert (await post(served, "/v1/embeddings", input=[5] * length)).status_code == 200
    assert threads[0] is threading.current_thread() is not threads[1]


def test_a_vector_that_has_not_come_is_not_left_out():
    one = SimpleNamespace(embedding=bytes(8), spec=SimpleNamespace(prompt_ids=[5]))
    call = SimpleNamespace(requests=[SimpleNamespace(embedding=None, spec=one.spec), one])
    with pytest.raises(AssertionError, match="first token"):
        EmbeddingAnswers(EmbeddingRequest(None, False, None), "demo").whole(call)


@in_event_loop
async def test_ranks_that_keep_no_rows_refuse():
    async with serving(1, limits=structs.replace(LIMITS, embedding_size=0)) as served:
        response = await post(served, "/v1/embeddings", input="a")
    assert response.status_code == 400
    assert "CPU" in response.json()["error"]["message"]
