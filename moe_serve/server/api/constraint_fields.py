"""What an output must match, in the fields of each API, made one `Constraint`.

Whether a schema or grammar is sound, `GrammarCheck.checked` says later (grammar_check.py), which `start_call` asks for
every request.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from moe_serve.attention_dp.constraint import MAX_CHARS, Constraint
from moe_serve.errors import RequestError
from moe_serve.server.edge.json_body import Body, OnlyFalse, show
from moe_serve.structured.json_schema import names_white_space, with_options

MAX_CHOICES = 10_000
ANY_OBJECT = '{"type":"object"}'
_PATTERN = "guided_whitespace_pattern"
_SGLANG_ANY = "$$ANY$$"  # SGLang's json_schema for any object

Text = Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]
JsonSchema = Annotated[dict[str, Any] | Text | bool, Meta(extra={"expected": "a JSON schema"})]
Tag = Annotated[
    dict[str, Any] | Text, Meta(description="SGLang's", extra={"expected": "an object with structures and triggers"})
]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class SglangForm(Body):
    """What an output must match in SGLang's names: one of these."""

    json_schema: JsonSchema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Tag | None = None


class StructuredOutputs(Body):
    """vLLM's form of an output: one of the first six."""

    json: JsonSchema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1)] | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: OnlyFalse | None = None


# OpenAI's, vLLM's guided_* and SGLang's; their types stand in `OpenAiCall`.
ResponseFormat = Annotated[
    dict[str, Any],
    Meta(
        description="type: text, json_object, json_schema or structural_tag",
        extra={"expected": "an object with type text, json_object, json_schema or structural_tag"},
        extra_json_schema={"required": ["type"]},
    ),
]


def sglang_constraint(given: SglangForm, prefix: str = "") -> Constraint | None:
    """Returns the one of json_schema, regex, ebnf and structural_tag that is given. prefix: of their names in errors

    Raises RequestError for more than one, or one that is too long.
    """
    return _the_only(_sglang_forms(given, prefix), prefix)


def openai_constraint(given: Any) -> Constraint | None:
    """Returns the one form of a call of OpenAI's routes: OpenAI's response_format, or one of vLLM's structured_outputs,
    guided_json, guided_regex, guided_choice and guided_grammar, or of SGLang's four. vLLM's guided_whitespace_pattern
    goes with a JSON schema.

    None: any text, also for response_format {"type": "text"}. Raises RequestError.
    """
    found = {
        "response_format": _of_response_format("response_format", given.response_format),
        "structured_outputs": _of_structured_outputs(given.structured_outputs),
        "guided_json": _of_schema("guided_json", given.guided_json),
        "guided_regex": _of_text("regex", "guided_regex", given.guided_regex),
        "guided_choice": _of_choices("guided_choice", given.guided_choice),
        "guided_grammar": _of_text("grammar", "guided_grammar", given.guided_grammar),
        **_sglang_forms(given, ""),
    }
    constraint, pattern = _the_only(found, ""), given.guided_whitespace_pattern
    return constraint if pattern is None else _with_white_space(constraint, _PATTERN, pattern)


def schema_constraint(schema: dict[str, Any] | bool, path: str) -> Constraint:
    """Returns the constraint of a JSON schema, such as that of the parameters of a tool that must be called.

    path: where the client has written it, for errors
    """
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), path=path)


def _sglang_forms(given: SglangForm, prefix: str) -> dict[str, Constraint | None]:
    is_any = given.json_schema == _SGLANG_ANY
    return {
        "json_schema": _of_schema(f"{prefix}json_schema", ANY_OBJECT if is_any else given.json_schema),
        "regex": _of_text("regex", f"{prefix}regex", given.regex),
        "ebnf": _of_text("grammar", f"{prefix}ebnf", given.ebnf),
        "structural_tag": _of_tag(f"{prefix}structural_tag", given.structural_tag),
    }


def _the_only(found: Mapping[str, Constraint | None], prefix: str) -> Constraint | None:
    given = {name: value for name, value in found.items() if value is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(
            f"{prefix}{first} and {prefix}{second} are both given, but an output matches one of them; send one",
            field=prefix + second,
        )
    constraint = next(iter(given.values()), None)
    if constraint is not None and len(constraint.text) > MAX_CHARS:
        name = prefix + next(iter(given))
        raise RequestError(
            f"{name} has {len(constraint.text)} characters, at most {MAX_CHARS} are taken; send a smaller one",
            field=name,
        )
    return constraint


def _of_schema(path: str, given: Any) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return schema_constraint(given, path)
    if not given.lstrip().startswith(("{", "true", "false")):
        raise RequestError(f"{path} is {show(given)}, expected a JSON schema", field=path)
    return Constraint("json_schema", given, path=path)


def _of_text(kind: str, path: str, given: str | None) -> Constraint | None:
    return None if given is None else Constraint(kind, given, path=path)


def _of_choices(path: str, given: list[str] | None) -> Constraint | None:
    return None if given is None else Constraint("choice", json.dumps(given, ensure_ascii=False), path=path)


def _of_tag(path: str, given: Any) -> Constraint | None:
    if given is None:
        return None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return Constraint("structural_tag", text, path=path)


def _of_response_format(path: str, given: dict[str, Any] | None) -> Constraint | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", ANY_OBJECT, path=path)
    if kind == "structural_tag":
        return _of_tag(path, {key: item for key, item in given.items() if key != "type"})
    if kind != "json_schema":
        raise RequestError(
            f"{path} is {show(given)}, expected an object with type text, json_object, json_schema or structural_tag",
            field=path,
        )
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise RequestError(f"{path}.json_schema has no schema; put the JSON schema there", field=f"{path}.json_schema")
    path = f"{path}.json_schema.schema"
    if not isinstance(schema, dict | bool | str):
        raise RequestError(f"{path} is {show(schema)}, expected a JSON schema", field=path)
    return _of_schema(path, schema)


def _of_structured_outputs(given: StructuredOutputs | None) -> Constraint | None:
    if given is None:
        return None
    prefix = "structured_outputs."
    any_object = Constraint("json_schema", ANY_OBJECT, path=f"{prefix}json_object") if given.json_object else None
    found = {
        "json": _of_schema(f"{prefix}json", given.json),
        "regex": _of_text("regex", f"{prefix}regex", given.regex),
        "choice": _of_choices(f"{prefix}choice", given.choice),
        "grammar": _of_text("grammar", f"{prefix}grammar", given.grammar),
        "json_object": any_object,
        "structural_tag": _of_tag(f"{prefix}structural_tag", given.structural_tag),
    }
    constraint = _the_only(found, prefix)
    if given.whitespace_pattern is not None:
        constraint = _with_white_space(constraint, f"{prefix}whitespace_pattern", given.whitespace_pattern)
    if given.disable_any_whitespace:
        constraint = _with_white_space(constraint, f"{prefix}disable_any_whitespace")
    return constraint


def _with_white_space(constraint: Constraint | None, field: str, pattern: str | None = None) -> Constraint:
    """Returns a JSON schema's constraint with what may stand between the parts of JSON.

    field: that asks for it, for errors;  pattern: a regular expression; None: nothing may
    Raises RequestError where there is no schema, or it says so itself.
    """
    if constraint is None or constraint.kind != "json_schema":
        raise RequestError(f"{field} is given, but it belongs to a JSON schema and there is none; leave it out", field)
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is given, but the schema is no JSON: {str(error)[:200]}", field) from None
    if names_white_space(schema):
        raise RequestError(f"{field} is given, and so is white space, by x-guidance or another field; send one", field)
    option = {"whitespace_flexible": False} if pattern is None else {"whitespace_pattern": pattern}
    return schema_constraint(with_options(schema, option), constraint.path)
