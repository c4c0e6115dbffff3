"""An error about the form of an output, or about tools, names what its client has sent, in the words of the route."""

from pathlib import Path
from typing import Any

import pytest

from moe_serve.server.api.generate import NOT_HELD_HEADER
from tests.server.api.calls import CHAT, COMPLETIONS, HI, post, says, with_template
from tests.server.served import in_event_loop, serving

RESPONSES = "/v1/responses"
BAD = {"type": "nothing"}
TAG = {"structures": [{"begin": "<f>", "schema": BAD, "end": ""}], "triggers": ["<f"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag", **TAG}}, "response_format"),
    ({"guided_json": BAD}, "guided_json"),
    ({"guided_json": BAD, "guided_whitespace_pattern": " "}, "guided_json"),
    ({"guided_regex": "(("}, "guided_regex"),
    ({"guided_grammar": "root ::= root root"}, "guided_grammar"),
    ({"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": BAD, "disable_any_whitespace": True}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag"),
    ({"json_schema": BAD}, "json_schema"),
    ({"ebnf": "root ::= root root"}, "ebnf"),
]
NESTED = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "g", "parameters": BAD}},
]
FLAT = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "parameters": BAD}]
SEARCH = {"type": "web_search"}
OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": NESTED, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tools[1].function.parameters", "cannot be served"),
    ({"tools": NESTED, "tool_choice": "required"}, "tools", "cannot be served"),
    ({"tools": [SEARCH]}, "tools[0].type", 'send {"type": "function", "function": {"name": "f", "parameters": {…}}}'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", 'send {"type": "function", "function": {"name": "f"'),
    ({"tools": NESTED, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice",
     '{"type": "function", "function": {"name": "f"}}'),
]  # fmt: skip
OF_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"text": {"format": {"type": "json_schema", "schema": BAD}}}, "text.format.schema", "cannot be served"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "text.format has no schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "text.format is an object"),
    ({"guided_json": BAD}, "guided_json", "cannot be served"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "g"}}, "tools[1].parameters", "cannot be served"),
    ({"tools": FLAT, "tool_choice": "required"}, "tools", "cannot be served"),
    ({"tools": [SEARCH]}, "tools[0].type", 'send {"type": "function", "name": "f", "parameters": {…}}'),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is null"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters", "expected a JSON schema"),
    ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice", '{"type": "function", "name": "f"}'),
    ({"max_output_tokens": "x"}, "max_output_tokens", "max_output_tokens is"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort", "reasoning.effort is 3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The answers to all calls, from one server: its process for forms reads the vocabulary once."""
    found: dict[str, list[Any]] = {}

    @in_event_loop
    async def ask() -> None:
        async with serving(1, with_template(Path(tmp_path_factory.mktemp("chat")))) as served:
            found["completions"] = [await post(served, COMPLETIONS, prompt="a", **fields) for fields, _ in FORMS]
            found["chats"] = [await post(served, CHAT, messages=HI, **fields) for fields, *_ in (*FORMS, *OF_CHATS)]
            found["responses"] = [await post(served, RESPONSES, input="hi", **fields) for fields, *_ in OF_RESPONSES]
            found["generate"] = [
                await served.generate(text="a", sampling_params={"json_schema": '{"type":"nothing"}'}),
                await served.generate(text="a", sampling_params={"ebnf": "root ::= root root"}),
                await served.generate(text=["a", "b"], sampling_params=[{}, {"regex": "(("}]),
            ]

    ask()
    return found


def check(answer: Any, field: str, says: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert says in error["message"]


@pytest.mark.parametrize("route", ["completions", "chats"])
@pytest.mark.parametrize("index", range(len(FORMS)), ids=[field for _, field in FORMS])
def test_a_form_that_cannot_be_compiled_is_reported_under_the_field_that_holds_it(
    route: str, index: int, answers: dict[str, list[Any]]
) -> None:
    """It was always json_schema, regex, grammar or structural_tag."""
    field = FORMS[index][1]
    check(answers[route][index], field, f"{field} cannot be served")


@pytest.mark.parametrize("index", range(len(OF_CHATS)))
def test_errors_about_tools_of_chats_name_their_fields(index: int, answers: dict[str, list[Any]]) -> None:
    check(answers["chats"][len(FORMS) + index], *OF_CHATS[index][1:])


@pytest.mark.parametrize("index", range(len(OF_RESPONSES)))
def test_errors_of_responses_name_their_own_fields_and_show_their_own_form(
    index: int, answers: dict[str, list[Any]]
) -> None:
    """A tool of another kind was shown the form of chats, which this route does not document."""
    check(answers["responses"][index], *OF_RESPONSES[index][1:])


def test_forms_of_generate_are_reported_with_their_path(answers: dict[str, list[Any]]) -> None:
    fields = ("sampling_params.json_schema", "sampling_params.ebnf", "sampling_params[1].regex")
    for answer, field in zip(answers["generate"], fields, strict=True):
        check(answer, field, f"{field} cannot be served")


LOOSE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}


@in_event_loop
async def test_words_that_cannot_be_held_are_named_by_the_answer_unless_strictness_is_asked_for(tmp_path):
    header = NOT_HELD_HEADER.decode()
    async with serving(1, with_template(tmp_path), reply=says("[1, 2]")) as served:

        def asked(strict: object, **fields: object):
            form = {"name": "n", "schema": LOOSE, **({} if strict is None else {"strict": strict})}
            given = {"type": "json_schema", "json_schema": form}
            return post(served, CHAT, messages=HI, max_tokens=20, response_format=given, **fields)

        for strict in (None, False):
            for stream in (False, True):
                response = await asked(strict, stream=stream)
                assert (response.status_code, response.headers[header]) == (200, 'Unimplemented keys: ["uniqueItems"]')
        refused = await asked(True)
        schema = {"type": "object", "properties": {"a": LOOSE}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        forced = {"messages": HI, "max_tokens": 20, "tool_choice": "required"}
        called = await post(served, CHAT, tools=tools, **forced)
        strict_tool = [{"type": "function", "function": {"name": "g", "parameters": schema, "strict": True}}]
        one_strict = await post(served, CHAT, tools=tools + strict_tool, **forced)
        plain = await post(served, CHAT, messages=HI, max_tokens=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert "uniqueItems" in refused.json()["error"]["message"]
    assert (called.status_code, called.headers[header]) == (200, 'Unimplemented keys: ["uniqueItems"]')
    assert one_strict.status_code == 400
    assert header not in plain.headers
