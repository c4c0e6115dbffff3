"""The OpenAPI document says what the server does: the schemas of bodies are made of what parses them."""

import json
import re
import warnings
from functools import partial

import pytest

from moe_serve.attention_dp.sampling_params import SamplingParams
from moe_serve.errors import RequestError
from moe_serve.server.api.embeddings import parse_embeddings, parse_pairs, parse_rerank
from moe_serve.server.api.native import parse_generate
from moe_serve.server.api.openai_requests import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from moe_serve.server.api.openapi import body_schemas
from moe_serve.server.api.responses import parse_response
from moe_serve.server.api.score import parse_score
from moe_serve.server.edge.guard import ADMIN, OPEN, tagged_routes
from tests.server.fake_worker import LIMITS
from tests.server.served import in_event_loop, serving

SCHEMAS = body_schemas()
PARSERS = {
    "GenerateRequest": partial(parse_generate, max_prompts=4),
    "CompletionRequest": partial(parse_completion, max_prompts=4),
    "ChatRequest": parse_chat,
    "ResponseRequest": parse_response,
    "TokenizeRequest": parse_tokenize,
    "DetokenizeRequest": parse_detokenize,
    "EmbeddingRequest": partial(parse_embeddings, max_prompts=4),
    "RerankRequest": partial(parse_rerank, max_prompts=4),
    "PairsRequest": partial(parse_pairs, max_prompts=4),
    "ScoreRequest": partial(parse_score, max_prompts=4, limits=LIMITS, tokenizer=None),
}


@pytest.mark.parametrize("name", PARSERS)
def test_the_example_of_a_schema_is_taken_and_so_are_values_that_ask_for_nothing(name):
    example = SCHEMAS[name]["example"]
    PARSERS[name](json.dumps(example).encode())
    for field, schema in SCHEMAS[name]["properties"].items():
        alternatives = schema.get("anyOf", [schema])
        for value in (value for each in alternatives for value in each.get("enum", ())):
            PARSERS[name](json.dumps({**example, field: value}).encode())
        if {"type": "null"} in alternatives:
            PARSERS[name](json.dumps({**example, field: None}).encode()) if field not in example else None


def test_the_schema_of_responses_has_no_field_of_chats_that_it_refuses():
    assert not {"messages", "max_tokens", "n"} & set(SCHEMAS["ResponseRequest"]["properties"])


def test_defaults_of_sampling_parameters_stand_in_the_schema_and_bounds_hold():
    def parse(name, value):
        body = {"text": "a", "sampling_params": {name: value}}
        return parse_generate(json.dumps(body).encode(), 4).prompts[0].params

    num_bounds = 0
    for name, schema in SCHEMAS["SamplingParams"]["properties"].items():
        first = schema.get("anyOf", [schema])[0]
        if "default" in first:
            assert getattr(SamplingParams(), name) == first["default"], name
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in first:
                num_bounds += 1
                parse(name, first[bound]) if name != "min_new_tokens" else None
                with pytest.raises(RequestError):
                    parse(name, first[bound] + step)
    assert num_bounds > 20


@in_event_loop
async def test_the_document_lists_every_route_once_and_who_may_call_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with serving() as served:
            document = (await served.client.get("/openapi.json")).json()
            tagged = tagged_routes(served.app)
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert ("POST", "/generate") in operations
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)
    for route, operation in operations.items():
        assert operation.get("description"), f"{route} says nothing of itself"
        assert set(operation["responses"]) >= {"200", "400", "429", "503"}
        assert "422" not in operation["responses"]
        needed = {name for one in operation.get("security", []) for name in one}
        assert needed == ({"admin_key"} if route in tagged[ADMIN] else set() if route in tagged[OPEN] else {"api_key"})
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "text/event-stream" in operations["POST", path]["responses"]["200"]["content"]
    named = {match.rpartition("/")[2] for match in re.findall(r'"(#/components/schemas/\w+)"', json.dumps(document))}
    assert named == set(document["components"]["schemas"])
    assert named >= {*PARSERS, "Error", "Placement", "SamplingParams"}, "clients generated from it know these names"


@in_event_loop
async def test_the_document_names_a_model_that_is_not_served_and_answers_that_are_text():
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": ["b"]},
        "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    async with serving(1) as served:
        paths = (await served.client.get("/openapi.json")).json()["paths"]
        for path, body in asked.items():
            answer = await served.client.post(path, json={**body, "model": "strange"})
            assert answer.status_code == 404
            assert "404" in paths[path]["post"]["responses"]
    assert set(paths["/flush_cache"]["post"]["responses"]["200"]["content"]) == {"text/plain"}
