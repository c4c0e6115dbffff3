"""`/v1/score` answers as SGLang's does."""

import json
import math
import tracemalloc

import pytest
from msgspec import structs

from moe_serve.errors import RequestError
from moe_serve.server.api.score import parse_score, scores_of
from tests.server.api.calls import TEXT, post
from tests.server.fake_worker import LIMITS
from tests.server.served import in_event_loop, serving

LABELS = {"label_token_ids": [8, 4]}  # whose log probabilities are -1 and -0.5, as fake_logprobs.py has them


@in_event_loop
async def test_each_item_has_the_probabilities_of_the_label_tokens_behind_it():
    async with serving(1) as served:
        fields = {"model": "demo", "query": "def ", "items": ["read", "write(x)"], **LABELS}
        texts = (await post(served, "/v1/score", **fields)).json()
        among = (await post(served, "/v1/score", **fields, apply_softmax=True, item_first=True)).json()
        ids = (await post(served, "/v1/score", query=[5, 6], items=[[7], [8, 9]], **LABELS)).json()
        one = (await post(served, "/v1/score", query=[5, 6], items=[7], **LABELS)).json()
        prompts = [submit.prompt_ids for submit in served.workers[0].submitted]
    joined = ["def read", "def write(x)", "readdef ", "write(x)def "]
    assert prompts == [*map(TEXT.encode, joined), [5, 6, 7], [5, 6, 8, 9], [5, 6, 7]]
    assert (texts["object"], texts["model"]) == ("scoring", "demo")
    assert texts["scores"] == [[pytest.approx(math.exp(-1)), pytest.approx(math.exp(-0.5))]] * 2
    assert texts["usage"]["prompt_tokens"] == texts["usage"]["total_tokens"] == sum(map(len, prompts[:2]))
    first = 1 / (1 + math.exp(0.5))
    assert among["scores"] == [[pytest.approx(first), pytest.approx(1 - first)]] * 2
    assert (len(ids["scores"]), len(one["scores"])) == (2, 1)


def test_a_softmax_of_tokens_that_are_all_improbable_adds_up_to_1():
    assert scores_of([-1000.0, -1000.0], softmax=True) == [0.5, 0.5]
    assert scores_of([-1000.0], softmax=False) == [0.0]


@pytest.mark.parametrize("query, item", [("a" * 1_000_000, "b"), ([5] * 1_000_000, [6])])
def test_a_long_query_is_not_joined_with_many_items(query, item):
    large = structs.replace(LIMITS, max_prompt_len=2**20, max_model_len=2**20 + 2)
    body = json.dumps({"query": query, "items": [item] * 30, **LABELS}).encode()
    parse_score(json.dumps({"query": query, "items": [item], **LABELS}).encode(), 100, large, TEXT)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"1000000 .*30 items .*at most 2097152 .*fewer items") as caught:
            parse_score(body, 100, large, TEXT)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field == "items"
    assert most < 6 * len(body), "a few copies of the body, and not one for each item"


WRONG = [
    ({"items": ["a"], **LABELS}, "query"),
    ({"query": "a", **LABELS}, "items"),
    ({"query": "a", "items": []}, "label_token_ids"),
    ({"query": "a", "items": [], **LABELS}, "items"),
    ({"query": "a", "items": [[5]], **LABELS}, "items"),
    ({"query": "a", "items": ["b", [5]], **LABELS}, "items[1]"),
    ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
    ({"query": "a", "items": ["b"], "label_token_ids": [5, 2048]}, "label_token_ids"),
    ({"query": [5, 2048], "items": [[5]], **LABELS}, "query"),
    ({"query": [5], "items": [5, 2048], **LABELS}, "items"),
    ({"query": [5], "items": [[5], [5, 2048]], **LABELS}, "items[1]"),
    ({"query": [5] * 150, "items": [[5], [5] * 100], **LABELS}, "items"),
    ({"query": "a" * 1_000_000, "items": ["b"], **LABELS}, "query"),
    ({"query": "a", "items": ["b" * 1_000_000], **LABELS}, "items"),
    ({"query": "a", "items": ["b"], **LABELS, "stream": True}, "stream"),
]


@in_event_loop
async def test_a_wrong_field_is_named():
    async with serving() as served:
        for fields, param in WRONG:
            response = await post(served, "/v1/score", **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        for query, item in (("a b" * 200, "c"), ([5] * 150, [5] * 100)):
            response = await post(served, "/v1/score", query=query, items=[item], **LABELS)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "items")
            assert error["message"].startswith("query with an item has "), error["message"]
        assert (await post(served, "/v1/score", model="x", query="a", items=["b"], **LABELS)).status_code == 404
