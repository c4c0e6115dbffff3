"""The OpenAPI document says what the server does."""

import json
import warnings

import pytest

from moe_serve.errors import RequestError
from moe_serve.server.api.openai_requests import parse_chat, parse_completion
from moe_serve.server.api.openapi import GENERATE, SAMPLING_PARAMS, openai_schemas
from moe_serve.server.api.response_request import parse_response
from moe_serve.server.api.schemas import parse_generate
from moe_serve.server.api.tokenize_request import parse_detokenize, parse_tokenize
from moe_serve.server.edge.guard import ADMIN, OPEN, tagged_routes
from tests.server.served import in_event_loop, serving

PARAMS = SAMPLING_PARAMS["properties"]


def known_fields(body: dict[str, object], parse=parse_generate) -> set[str]:
    """The fields that the parser knows, from its error about an unknown one."""
    with pytest.raises(RequestError, match="is not a field; known here: ") as caught:
        parse(json.dumps(body).encode(), 4)
    return set(str(caught.value).partition("known here: ")[2].split(", "))


def test_the_schema_has_the_fields_of_the_parser():
    strange = "zzzzzzzzzzzz"
    assert set(GENERATE["properties"]) == known_fields({"text": "a", strange: 1})
    assert set(PARAMS) == known_fields({"text": "a", "sampling_params": {strange: 1}})


OPENAI = openai_schemas(SAMPLING_PARAMS)
STRANGE = "zzzzzzzzzzzz"
ROUTES = [
    ("CompletionRequest", parse_completion, {"prompt": "a"}),
    ("ChatRequest", parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
    ("TokenizeRequest", parse_tokenize, {"messages": [{"role": "user", "content": "a"}]}),
    ("DetokenizeRequest", parse_detokenize, {"tokens": [5]}),
]


@pytest.mark.parametrize(("name", "parse", "body"), ROUTES, ids=[name for name, _, _ in ROUTES])
def test_the_schemas_of_openais_routes_have_the_fields_and_the_neutral_values_of_their_parsers(name, parse, body):
    properties = OPENAI[name]["properties"]
    known = known_fields({**body, STRANGE: 1}, parse)
    assert known | ({"prompt"} if name == "TokenizeRequest" else set()) == set(properties)
    for field, schema in properties.items():
        for value in schema.get("enum", ()):
            parse(json.dumps({**body, field: value}).encode(), 4)
        for bound, step in (("minimum", -1), ("maximum", 1)):
            for limited in schema.get("anyOf", ()):
                if bound in limited and field not in ("min_tokens", "max_tokens", "max_completion_tokens", "minimum"):
                    with pytest.raises(RequestError):
                        parse(json.dumps({**body, field: limited[bound] + step}).encode(), 4)
    parse(json.dumps({**OPENAI[name]["example"]}).encode(), 4)


def test_the_schema_of_responses_has_an_example_and_no_field_of_chats_that_it_refuses():
    schema = OPENAI["ResponseRequest"]
    parse_response(json.dumps(schema["example"]).encode(), 4)
    assert not {"messages", "max_tokens", "n"} & set(schema["properties"])


def test_defaults_and_bounds_of_the_schema_are_those_of_the_parser():
    def params(**fields):
        return parse_generate(json.dumps({"text": "a", "sampling_params": fields}).encode(), 4).prompts[0]

    for name, schema in PARAMS.items():
        first = schema.get("anyOf", [{}])[0]
        if "default" in first and name != "n":
            assert getattr(params().params, name) == first["default"], name
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in first:
                params(**{name: first[bound], **({"max_new_tokens": 2**40} if name == "min_new_tokens" else {})})
                with pytest.raises(RequestError):
                    params(**{name: first[bound] + step})
        for value in schema.get("enum", ()):
            params(**{name: value})


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
    body = operations["POST", "/generate"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateRequest"}


@in_event_loop
async def test_the_document_names_a_model_that_is_not_served_and_answers_that_are_text():
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
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
