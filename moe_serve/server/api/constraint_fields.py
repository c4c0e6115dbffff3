"""Parses what an output must match, from the fields of each API, into one `Constraint`.

A door calls `take_sglang_constraint` or `take_openai_constraint` with the `Fields` of its JSON object, and puts the
result into `SamplingParams.constraint`. Whether a schema or grammar is sound, `GrammarCheck.checked` says later
(grammar_check.py), which `start_call` asks for every request.
"""

import json
from collections.abc import Callable
from typing import Any

from moe_serve.attention_dp.constraint import MAX_CHARS, Constraint
from moe_serve.errors import RequestError
from moe_serve.server.edge.json_fields import Fields, boolean, show
from moe_serve.structured.json_schema import names_white_space, with_options

MAX_CHOICES = 10_000
ANY_OBJECT = '{"type":"object"}'
_PATTERN = "guided_whitespace_pattern"
_SGLANG_ANY = "$$ANY$$"  # SGLang's json_schema for any object


def take_sglang_constraint(values: Fields) -> Constraint | None:
    """Takes json_schema, regex, ebnf and structural_tag, of which a request may have one. Raises RequestError."""
    return _the_only(
        {
            name: values.take(name, check)
            for name, check in (
                ("json_schema", _sglang_schema), ("regex", _regex), ("ebnf", _grammar), ("structural_tag", _tag),
            )
        },
        values.prefix,
    )  # fmt: skip


def take_openai_constraint(values: Fields) -> Constraint | None:
    """Takes OpenAI's response_format, and vLLM's structured_outputs and guided_json, guided_regex, guided_choice and
    guided_grammar, of which a request may have one; and SGLang's four names. vLLM's guided_whitespace_pattern goes
    with a JSON schema. Raises RequestError.

    None: any text, also for response_format {"type": "text"}.
    """
    found = {
        name: values.take(name, check)
        for name, check in (
            ("response_format", _response_format), ("structured_outputs", _structured_outputs),
            ("guided_json", _schema), ("guided_regex", _regex), ("guided_choice", _choice),
            ("guided_grammar", _grammar),
            ("json_schema", _sglang_schema), ("regex", _regex), ("ebnf", _grammar), ("structural_tag", _tag),
        )
    }  # fmt: skip
    pattern = values.take(_PATTERN, _text)
    constraint = _the_only(found, values.prefix)
    return constraint if pattern is None else _with_white_space(constraint, values.prefix + _PATTERN, pattern)


def schema_constraint(schema: dict[str, Any] | bool, path: str) -> Constraint:
    """Returns the constraint of a JSON schema, such as that of the parameters of a tool that must be called.

    path: where the client has written it, for errors
    """
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), path=path)


def _the_only(found: dict[str, Constraint | None], prefix: str) -> Constraint | None:
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


def _schema(name: str, value: Any) -> Constraint:
    """Checks a JSON schema: an object, a boolean, or either as a string of JSON."""
    if isinstance(value, str):
        if not value.lstrip().startswith(("{", "true", "false")):
            raise RequestError(f"{name} is {show(value)}, expected a JSON schema", field=name)
        return Constraint("json_schema", value, path=name)
    if not isinstance(value, dict | bool):
        raise RequestError(f"{name} is {show(value)}, expected a JSON schema", field=name)
    return schema_constraint(value, name)


def _sglang_schema(name: str, value: Any) -> Constraint:
    return Constraint("json_schema", ANY_OBJECT, path=name) if value == _SGLANG_ANY else _schema(name, value)


def _of_text(kind: str) -> Callable[[str, Any], Constraint]:
    def check(name: str, value: Any) -> Constraint:
        return Constraint(kind, _text(name, value), path=name)

    return check


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {show(value)}, expected a string that is not empty", field=name)
    return value


_regex, _grammar = _of_text("regex"), _of_text("grammar")


def _choice(name: str, value: Any) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise RequestError(f"{name} is {show(value)}, expected a list of strings that are not empty", field=name)
    if len(value) > MAX_CHOICES:
        raise RequestError(f"{name} has {len(value)} entries, at most {MAX_CHOICES} are taken; send fewer", field=name)
    return Constraint("choice", json.dumps(value, ensure_ascii=False), path=name)


def _tag(name: str, value: Any) -> Constraint:
    if isinstance(value, str) and value:
        return Constraint("structural_tag", value, path=name)
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object with structures and triggers", field=name)
    return Constraint("structural_tag", json.dumps(value, ensure_ascii=False), path=name)


def _response_format(name: str, value: Any) -> Constraint | None:
    """Checks OpenAI's response_format: text, json_object, json_schema; and SGLang's structural_tag."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", ANY_OBJECT, path=name)
    if kind == "structural_tag":
        return _tag(name, {key: item for key, item in value.items() if key != "type"})
    if kind != "json_schema":
        raise RequestError(
            f"{name} is {show(value)}, expected an object with type text, json_object, json_schema or structural_tag",
            field=name,
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise RequestError(f"{name}.json_schema has no schema; put the JSON schema there", field=f"{name}.json_schema")
    return _schema(f"{name}.json_schema.schema", schema)


def _structured_outputs(name: str, value: Any) -> Constraint | None:
    """Checks vLLM's object with one of json, regex, choice, grammar, json_object and structural_tag."""
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {show(value)}, expected an object", field=name)
    neutral = {"disable_fallback": (False, True), "disable_additional_properties": (False,)}
    fields = Fields(value, f"{name}.", neutral, {})
    found = {
        key: fields.take(key, check)
        for key, check in (
            ("json", _schema), ("regex", _regex), ("choice", _choice), ("grammar", _grammar),
            ("json_object", _any_object), ("structural_tag", _tag),
        )
    }  # fmt: skip
    pattern = fields.take("whitespace_pattern", _text)
    has_none = fields.take("disable_any_whitespace", boolean)
    fields.refuse_the_rest()
    constraint = _the_only(found, f"{name}.")
    if pattern is not None:
        constraint = _with_white_space(constraint, f"{name}.whitespace_pattern", pattern)
    return _with_white_space(constraint, f"{name}.disable_any_whitespace") if has_none else constraint


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


def _any_object(name: str, value: Any) -> Constraint | None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {show(value)}, expected true or false", field=name)
    return Constraint("json_schema", ANY_OBJECT, path=name) if value else None
