"""The contract of all parsers: cuts change nothing, unknown text is content, no text is lost, nothing raises."""

import itertools
import json
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.server.api.tools.harmony import HarmonyParser
from moe_serve.server.api.tools.json_calls import HermesParser, MistralParser
from moe_serve.server.api.tools.marker_calls import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from moe_serve.server.api.tools.parser import CallArguments, CallStart, Content, Parser, Part, joined
from moe_serve.server.api.tools.think import ThinkParser, ThinkTags
from moe_serve.server.api.tools.xml_calls import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}},
    },
    "now": {},
}
DS, DE, CS, CE, SEP = (f"<｜tool▁{w}｜>" for w in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
WEATHER = {"city": 'Paris "é"\n😀', "days": 3, "deep": {"a": [1, -2.5e3, {}, [], None, True], "b": "\\"}}
RAW = json.dumps(WEATHER, ensure_ascii=False)


def xml(start: str, key: str, value: str, end: str) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in WEATHER.items()}
    return start + "".join(key.format(k) + value.format(v) for k, v in texts.items()) + end


# Of each format: its parser, and a text with two calls: get_weather(WEATHER) and now().
FORMATS: dict[str, tuple[Callable[[], Parser], str]] = {
    "hermes": (
        lambda: HermesParser(TOOLS),
        f'<tool_call>\n{{"name": "get_weather", "arguments": {RAW}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "deepseekv3": (
        lambda: DeepSeekV3Parser(TOOLS),
        f"{DS}{CS}function{SEP}get_weather\n```json\n{RAW}\n```{CE}\n{CS}function{SEP}now\n```json\n{{}}\n```{CE}{DE}",
    ),
    "deepseekv31": (
        lambda: DeepSeekV31Parser(TOOLS),
        f"{DS}{CS}get_weather{SEP}{RAW}{CE}{CS}now{SEP}{{}}{CE}{DE}",
    ),
    "kimi_k2": (
        lambda: KimiK2Parser(TOOLS),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{RAW}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "mistral list": (
        lambda: MistralParser(TOOLS),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {RAW}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "mistral": (
        lambda: MistralParser(TOOLS),
        f"[TOOL_CALLS]get_weather[ARGS]{RAW}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
    ),
    "qwen3_coder": (
        lambda: Qwen3CoderParser(TOOLS),
        xml(
            "<tool_call>\n<function=get_weather>\n",
            "<parameter={}>\n",
            "{}\n</parameter>\n",
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ),
    ),
    "glm45": (
        lambda: Glm45Parser(TOOLS),
        xml(
            "<tool_call>get_weather\n",
            "<arg_key>{}</arg_key>\n",
            "<arg_value>{}</arg_value>\n",
            "</tool_call>\n<tool_call>now\n</tool_call>",
        ),
    ),
    "minimax_m2": (
        lambda: MiniMaxM2Parser(TOOLS),
        xml(
            '<minimax:tool_call>\n<invoke name="get_weather">\n',
            '<parameter name="{}">',
            "{}</parameter>\n",
            '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        ),
    ),
    "gpt-oss": (
        lambda: HarmonyParser(TOOLS),
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{RAW}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>",
    ),
    "think": (lambda: ThinkParser(ThinkTags(), ""), "<think>\nFirst.\n</think>\n\n"),
}
CALLING = [name for name in FORMATS if name != "think"]
every_format = pytest.mark.parametrize("name", FORMATS)
calling = pytest.mark.parametrize("name", CALLING)


def parse(parser: Parser, pieces: list[str]) -> list[Part]:
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    starts = [part for part in parts if isinstance(part, CallStart)]
    return [
        (s.name, "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == s.index)) for s in starts
    ]


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def words_of(name: str) -> list[str]:
    """Pieces of a format, from which broken texts are made."""
    found = re.findall(r"<[^>]*>|\[[A-Z_]+\]|[{}\[\]:,]|\"[^\"]*\"|[^<>{}\[\]:,\"]+", FORMATS[name][1])
    return list(dict.fromkeys([*found, "<", "x", "```", '"', "\\", "</think>", "\n" * 20, "null", "12", "{}"]))


def texts_of(name: str) -> st.SearchStrategy[str]:
    """Whole texts of a format, texts with a part missing or repeated, and any sequence of its pieces."""
    whole = FORMATS[name][1]
    places = st.integers(0, len(whole))
    spliced = st.tuples(places, places, st.sampled_from(words_of(name))).map(
        lambda t: whole[: min(t[:2])] + t[2] + whole[max(t[:2]) :]
    )
    soup = st.lists(st.sampled_from(words_of(name)) | st.text(max_size=3), max_size=25).map("".join)
    before = st.sampled_from(["", "Let me look.", "Hm \n\n", "<", "a < b"])
    return st.tuples(before, st.just(whole) | spliced | soup, before).map("".join)


@every_format
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cuts_change_nothing(name, data):
    make = FORMATS[name][0]
    text = data.draw(texts_of(name))
    whole = parse(make(), [text])
    assert parse(make(), list(text)) == whole
    assert parse(make(), cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == whole


def test_json_that_breaks_behind_a_number_loses_nothing():
    text = '<tool_call>{"name": "now", "arguments": {"days": 3<x>'
    assert content_of(parse(HermesParser(TOOLS), [text])) == "3<x>"


@every_format
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.sampled_from("abc <{[\"'\n\\/>漢😀") | st.characters(codec="utf-8"), max_size=80))
def test_text_without_markers_is_content_as_it_is(name, text):
    parts = parse(FORMATS[name][0](), list(text))
    assert content_of(parts) == text
    assert not calls_of(parts)


@pytest.mark.parametrize("name", [name for name in CALLING if name != "gpt-oss"])  # whose headers are no text
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_malformed_is_content_and_nothing_of_it_is_lost(name, data):
    """Without the client's functions, no text is a call: all of it comes out, but for space at markers."""
    text = data.draw(texts_of(name))
    parser = type(FORMATS[name][0]())({})
    assert "".join(content_of(parse(parser, [text])).split()) == "".join(text.split())


@calling
def test_calls_are_read_with_the_text_around_them(name):
    make, text = FORMATS[name]
    before, after = "I look.\n", ""
    if name == "gpt-oss":
        before, after = "<|channel|>final<|message|>I look.<|end|><|start|>assistant", ""
    parts = parse(make(), [before + text + after])
    (first, arguments), second = calls_of(parts)
    assert (first, json.loads(arguments)) == ("get_weather", WEATHER)
    assert second == ("now", "{}")
    assert content_of(parts) == "I look."


@calling
def test_arguments_come_in_increments_that_join_to_json(name):
    make, text = FORMATS[name]
    parser = make()
    parts = [part for char in text for part in parser.push(char)] + parser.finish()
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["get_weather", "now"]
    increments = [part for part in parts if isinstance(part, CallArguments) and part.index == 0]
    assert len(increments) > 10
    assert max(len(part.text) for part in increments) < 64


@calling
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_a_call_that_the_end_of_the_text_cuts_off_stays_a_call(name, share):
    make, text = FORMATS[name]
    at = text.index("Paris") + int(share * len(text) / 4)
    parts = parse(make(), [text[:at]])
    assert [call for call, _ in calls_of(parts)] == ["get_weather"]
    assert content_of(parts) == ""


@calling
def test_a_function_that_the_client_has_not_is_content(name):
    make, text = FORMATS[name]
    parts = parse(type(make())({"now": {}}), [text])
    assert [call for call, _ in calls_of(parts)] in (["now"], [])
    assert "Paris" in content_of(parts)


@calling
def test_a_flood_of_markers_ends_soon(name):
    make, _ = FORMATS[name]
    marker = type(make()).markers[0] if type(make()).markers else "<|start|>"
    assert len(content_of(parse(make(), [marker * 4_000]))) >= (0 if name == "gpt-oss" else len(marker) * 3_900)


HALF = r"\ud800"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "hermes",
            json.dumps({"name": "now", "arguments": f'{{"days": "{HALF}"}}'}).join(("<tool_call>", "</tool_call>")),
        ),
        ("glm45", f'<tool_call>now\n<arg_key>days</arg_key><arg_value>["{HALF}"]</arg_value></tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"days\\": 1e999}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"days\\": NaN}"}</tool_call>'),
        ("glm45", "<tool_call>now\n<arg_key>days</arg_key><arg_value>1e999</arg_value></tool_call>"),
        ("glm45", "<tool_call>now\n<arg_key>days</arg_key><arg_value>[NaN]</arg_value></tool_call>"),
    ],
)
def test_arguments_that_python_reads_and_json_has_not_can_be_sent(name, text):
    """Half of a surrogate pair stays escaped; a number beyond numbers is text, or the call is content."""
    parser = type(FORMATS[name][0]())({"now": {"properties": {"days": {"type": ["number", "array"]}}}})
    parts = parse(parser, [text])
    sent = msgspec.json.encode(parts)
    for _, arguments in calls_of(parts):
        if arguments or HALF in text:  # the arguments of a call that has begun may be content
            msgspec.json.decode(arguments.replace(HALF, "half"))  # unlike json.loads, it knows JSON alone
    assert (HALF not in text) or (HALF.encode() in sent)
    assert any(arguments for _, arguments in calls_of(parts)) or "days" in content_of(parts)


NAME = {"$defs": {"Name": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),  # pydantic's str | None
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "123", 123),
        ({"anyOf": [{"type": "integer"}, {}]}, "123", 123),
        ({"oneOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "true", "true"),
        ({"allOf": [{"$ref": "#/$defs/Name"}]}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/Missing"}, "[1]", [1]),
        ({"$ref": "#/$defs/Loop/anyOf/1"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/Loop/anyOf/٠"}, "[1]", [1]),  # no digit of JSON pointers
        ({"$ref": "#/$defs/Loop/anyOf/" + "9" * 5000}, "[1]", [1]),  # int() would raise
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": None}, "null", None),
        ({"anyOf": [{"type": "string"}] * 100_000}, "1", 1),  # more than is looked at
    ],
)
def test_a_parameter_is_text_where_its_schema_says_so_in_any_way(schema, text, value):
    tools = {"f": {"type": "object", "properties": {"x": schema}, **NAME}}
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    ((name, arguments),) = calls_of(parse(Qwen3CoderParser(tools), [call]))
    assert (name, json.loads(arguments)) == ("f", {"x": value})
