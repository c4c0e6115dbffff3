"""Which tokens may come next: complete outputs alone may end, and only what came before decides."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.config import load_config, model_dir
from moe_serve.errors import ModelError, RequestError
from moe_serve.models.token_bytes import token_bytes
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.structured.grammar import Matcher, to_grammar
from moe_serve.structured.vocabulary import Vocabulary

EOS = 1


TEXT = Tokenizer.from_folder(model_dir(load_config().model))


@cache
def demo_tokens() -> list[bytes | None]:
    return TEXT.token_bytes(2050)


@cache
def demo_vocabulary() -> Vocabulary:
    return Vocabulary(demo_tokens(), [EOS])


def matcher_of(kind: str, text: str) -> Matcher:
    return Matcher.compiled(to_grammar(Constraint(kind, text)), demo_vocabulary(), kind)


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), count=demo_vocabulary().size, bitorder="little")
    return np.flatnonzero(bits).tolist()


def draw_output(matcher: Matcher, seed: int, most: int = 400) -> list[int]:
    """Returns tokens drawn from the masks up to the end; it ends where it can, so that outputs stay short."""
    draw, output = random.Random(seed), []
    while len(output) < most:
        ids = allowed(matcher)
        if EOS in ids and (len(ids) == 1 or draw.random() < 0.5):
            return output
        output.append(draw.choice([token for token in ids if token != EOS]))
        matcher.advance(output[-1:])
    raise AssertionError(f"no end after {most} tokens: {text_of(output)!r}")


def text_of(output: list[int]) -> str:
    return b"".join(demo_tokens()[token] or b"?" for token in output).decode()


FORMS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "regex": ("regex", "(ab|cd){1,3}-[0-9]{2}", lambda text: re.fullmatch("(ab|cd){1,3}-[0-9]{2}", text)),
    "choice": ("choice", '["yes", "no", "yes, \\"é\\""]', lambda text: text in ("yes", "no", 'yes, "é"')),
    "gbnf": ("grammar", 'root ::= "x" ("y" | "z") tail\ntail ::= "!"?', lambda text: re.fullmatch("x[yz]!?", text)),
    "lark": ("grammar", 'start: "x" A\nA: /[yz]{2}/', lambda text: re.fullmatch("x[yz]{2}", text)),
    "schema": (
        "json_schema",
        '{"type":"object","properties":{"a":{"enum":[1,"b",null]}},"required":["a"],"additionalProperties":false}',
        lambda text: json.loads(text)["a"] in (1, "b", None),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_output_that_ends_has_its_form(form: str) -> None:
    kind, text, has_form = FORMS[form]
    compiled = matcher_of(kind, text)
    outputs = {text_of(draw_output(compiled.copy(), seed)) for seed in range(8)}
    assert all(map(has_form, outputs)), outputs
    assert len(outputs) > 1


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_a_function_of_the_tokens_so_far(form: str) -> None:
    kind, text, _ = FORMS[form]
    compiled = matcher_of(kind, text)
    output = draw_output(compiled.copy(), seed=3)
    growing = compiled.copy()
    for count in range(len(output) + 1):
        anew = matcher_of(kind, text)
        anew.advance(output[:count])
        assert (anew.mask() == growing.mask()).all()
        assert anew.may_end == growing.may_end
        assert anew.must_end == growing.must_end
        growing.advance(output[count : count + 1])


def test_the_end_may_come_only_where_the_output_is_complete_and_must_where_nothing_follows() -> None:
    matcher = matcher_of("regex", "ab?")
    assert EOS not in allowed(matcher)
    tokens = {each: token for token, each in enumerate(demo_tokens()) if each}
    matcher.advance([tokens[b"a"]])
    assert set(allowed(matcher)) == {EOS, tokens[b"b"]}
    assert (matcher.may_end, matcher.must_end) == (True, False)
    matcher.advance([tokens[b"b"]])
    assert allowed(matcher) == [EOS]
    assert matcher.must_end


scalars = st.sampled_from(
    [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}, {"type": "null"}, {"enum": ["é", "x", 7]},
     {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]{2}$"}, {"const": {"k": [1]}}]
)  # fmt: skip
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}),
        st.dictionaries(st.sampled_from(["a", "b é", 'c"']), inner, max_size=3).map(
            lambda fields: {
                "type": "object", "properties": fields, "required": list(fields)[:2], "additionalProperties": False
            }
        ),
    ),
    max_leaves=4,
)  # fmt: skip


@given(schema=schemas, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_outputs_under_a_schema_parse_and_validate(schema: dict[str, Any], seed: int) -> None:
    text = text_of(draw_output(matcher_of("json_schema", json.dumps(schema)), seed))
    assert_valid(json.loads(text), schema)


LAYOUTS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}]


def in_a_tag(schema: dict[str, Any]) -> tuple[str, str]:
    structure = {"begin": "<f>", "schema": schema, "end": "</f>"}
    return "structural_tag", json.dumps({"structures": [structure], "triggers": ["<f>"]})


@pytest.mark.parametrize("is_in_tag", [False, True], ids=["json_schema", "structural_tag"])
def test_json_may_be_laid_out_as_usual_but_its_white_space_ends(is_in_tag: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}}}
    begin, end = ("<f>", "</f>") if is_in_tag else ("", "")
    compiled = matcher_of(*(in_a_tag(schema) if is_in_tag else ("json_schema", json.dumps(schema))))
    for layout in LAYOUTS:
        text = json.dumps({"a": [{"b": 1}, {"c": [2, 3]}]}, **layout)
        whole = compiled.copy()
        whole.advance(TEXT.encode(begin + text + end))
        assert whole.may_end
    for blank in (" ", "\n", "\t", "\n "):  # a small model loses itself in these
        growing = compiled.copy()
        growing.advance(TEXT.encode(begin + "{"))
        with pytest.raises(RequestError, match="cannot be served"):
            growing.advance(TEXT.encode(blank * 50))


def test_a_schema_with_its_own_options_decides_about_white_space() -> None:
    for options, fits in (({"whitespace_flexible": True}, True), ({"whitespace_flexible": False}, False)):
        matcher = matcher_of("json_schema", json.dumps({"type": "object", "x-guidance": options}))
        if fits:
            matcher.advance(TEXT.encode("{" + " " * 50))
        else:
            with pytest.raises(RequestError, match="cannot be served"):
                matcher.advance(TEXT.encode("{ "))
    one_space = matcher_of("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}))
    one_space.copy().advance(TEXT.encode("{ "))
    with pytest.raises(RequestError, match="cannot be served"):
        one_space.advance(TEXT.encode("{  "))


def assert_valid(value: Any, schema: dict[str, Any]) -> None:
    """Checks a value against the few words that `schemas` uses."""
    if "anyOf" in schema:
        failures = []
        for each in schema["anyOf"]:
            try:
                assert_valid(value, each)
            except AssertionError as error:
                failures.append(error)
        assert len(failures) < len(schema["anyOf"]), failures
        return
    if "enum" in schema:
        assert value in schema["enum"]
    elif "const" in schema:
        assert value == schema["const"]
    elif schema["type"] == "integer":
        assert type(value) is int
        assert 0 <= value <= 99
    elif schema["type"] == "boolean":
        assert isinstance(value, bool)
    elif schema["type"] == "null":
        assert value is None
    elif schema["type"] == "string":
        assert isinstance(value, str)
        assert len(value) <= schema.get("maxLength", 2)
        assert re.search(schema.get("pattern", ""), value)
    elif schema["type"] == "array":
        assert isinstance(value, list)
        assert len(value) <= 2
        for item in value:
            assert_valid(item, schema["items"])
    else:
        assert isinstance(value, dict)
        assert set(schema["required"]) <= set(value) <= set(schema["properties"])
        for name, item in value.items():
            assert_valid(item, schema["properties"][name])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(("), ("json_schema", "{"), ("json_schema", '{"type":"nothing"}'), ("grammar", "root ::= other"),
        ("json_schema", '{"$ref":"http://example.org/schema"}'), ("grammar", "???"), ("choice", "7"),
        ("structural_tag", "{}"), ("structural_tag", '{"structures":[{"begin":"<f>"}],"triggers":["<f"]}'),
        ("structural_tag", '{"structures":[{"begin":"<f>","end":"","schema":{}}],"triggers":["<g"]}'),
        ("json_schema", "[" * 5000), ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("regex", "a{1000000000}{1000}b\\b"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_kind(kind: str, text: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind}") as caught:
        matcher_of(kind, text).mask()
    assert caught.value.field == kind
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("is_in_tag", [False, True])
def test_a_format_that_is_not_known_is_an_annotation_and_others_hold(is_in_tag: bool) -> None:
    """As a model class of pydantic asks with Path and UUID."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "path"},
            "default": {"$ref": "#/$defs/format"},
            "kind": {"const": {"format": "path"}},
        },
        "required": ["format", "default", "kind"],
        "additionalProperties": False,
        "$defs": {"format": {"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null", "format": "none"}]}},
    }
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    kind = "structural_tag" if is_in_tag else "json_schema"
    matcher = matcher_of(kind, json.dumps(tag if is_in_tag else schema))

    def takes(default: Any) -> bool:
        text = json.dumps({"format": "a/b", "default": default, "kind": {"format": "path"}})
        attempt = matcher.copy()
        try:
            attempt.advance(TEXT.encode(f"<f>{text}</f>" if is_in_tag else text))
        except RequestError:
            return False
        return attempt.may_end

    assert takes(None)
    assert takes("123e4567-e89b-12d3-a456-426614174000")
    assert not takes("no uuid")


def test_tags_constrain_what_follows_their_trigger_and_nothing_else() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": [12]}, "end": "</f>"}], "triggers": ["<f"]}
    matcher = matcher_of("structural_tag", json.dumps(tag))
    tokens = {each: token for token, each in enumerate(demo_tokens()) if each}
    assert EOS in allowed(matcher)
    matcher.advance([tokens[bytes([byte])] for byte in b"x <f>"])
    assert {(demo_tokens()[token] or b"")[:1] for token in allowed(matcher)} == {b"1"}
    matcher.advance([tokens[bytes([byte])] for byte in b"12</f>"])
    assert EOS in allowed(matcher)


def test_bytes_of_byte_level_tokens_are_those_of_the_text() -> None:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    for text in ("def f(x):\n\treturn 'é ß 漢字 🎉'", " \x00\x7f\u00a0\u00ad"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(demo_tokens()[token] or b"" for token in ids) == text.encode()
    assert demo_tokens()[:2] == [None, None], "special tokens stand for no text"
    assert demo_tokens()[2048:] == [None, None], "ids beyond the vocabulary do not, either"


def test_bytes_of_sentencepiece_tokens_have_spaces_and_byte_tokens() -> None:
    words = {"<s>": 0, "▁the": 1, "<0x0A>": 2, "é": 3, "<think>": 4}
    backend = Backend(models.BPE(words, []))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    assert token_bytes(backend, 6) == [None, b" the", b"\n", "é".encode(), b"<think>", None]


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        token_bytes(backend, 2)


def test_a_model_without_an_end_serves_no_constraints() -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        Vocabulary([b"a", b"b"], [])
