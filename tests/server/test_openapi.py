"""The OpenAPI document says what the server does."""

import json
import warnings

import pytest

from moe_serve.errors import RequestError
from moe_serve.server.guard import ADMIN, OPEN, tagged_routes
from moe_serve.server.openapi import GENERATE, SAMPLING_PARAMS
from moe_serve.server.schemas import parse_generate
from tests.server.served import in_event_loop, serving

PARAMS = SAMPLING_PARAMS["properties"]


def known_fields(body: dict[str, object]) -> set[str]:
    """The fields that the parser knows, from its error about an unknown one."""
    with pytest.raises(RequestError, match="is not a field; known here: ") as caught:
        parse_generate(json.dumps(body).encode(), max_prompts=4)
    return set(str(caught.value).partition("known here: ")[2].split(", "))


def test_the_schema_has_the_fields_of_the_parser():
    strange = "zzzzzzzzzzzz"
    assert set(GENERATE["properties"]) == known_fields({"text": "a", strange: 1})
    assert set(PARAMS) == known_fields({"text": "a", "sampling_params": {strange: 1}})


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
    body = operations["POST", "/generate"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateRequest"}
