"""gpt-oss' channels become reasoning, content and calls; markers never show."""

import pytest

from moe_serve.server.api.tools.harmony import HarmonyParser
from moe_serve.server.api.tools.parser import CallArguments, CallStart, Content, Part, Reasoning, joined

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLED = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]


def parts_of(text: str, tools: tuple[str, ...] = ("f",)) -> list[Part]:
    whole = HarmonyParser({name: {} for name in tools})
    parts = joined(whole.push(text) + whole.finish())
    parser = HarmonyParser({name: {} for name in tools})
    assert joined([part for char in text for part in parser.push(char)] + parser.finish()) == parts
    return parts


@pytest.mark.parametrize(
    "text, parts",
    [
        (f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>", [Reasoning("Hm."), Content("Yes.")]),
        (f"{THOUGHT}<|channel|>final<|message|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>", [Reasoning("Hm.\nHm.")]),
        ("<|channel|>commentary<|message|>I call.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
         [Content("I call.\nYes.")]),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', CALLED),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', CALLED),
        (' to=functions.f<|channel|>commentary<|message|>{"a": 1}', CALLED),
        (f'{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', [Reasoning("Hm."), *CALLED]),
        ('<|channel|>commentary to=functions.g<|message|>{"a": 1}<|call|>', [Content('{"a": 1}')]),
        ("<|channel|>analysis to=browser.search<|message|>query<|call|>", [Reasoning("query")]),
        ("<|channel|>commentary to=functions.f<|message|>no JSON<|call|>", [Content("no JSON")]),
        ('<|channel|>commentary to=functions.f<|message|>{"a": x}<|call|>',
         [CallStart(0, "f"), CallArguments(0, '{"a": '), Content("x}")]),
        ("<|channel|>final<|message|>It ends wi", [Content("It ends wi")]),
        (f"{THOUGHT}<|channel|>fin", [Reasoning("Hm.")]),
        (f"{THOUGHT}", [Reasoning("Hm.")]),
        ("Plain text.", [Content("Plain text.")]),
        ("assistant or to= and more text", [Content("assistant or to= and more text")]),
        ("<|channel|>" + "x" * 600, [Content("<|channel|>" + "x" * 600)]),
        ("", []),
    ],
)  # fmt: skip
def test_messages_become_parts(text, parts):
    assert parts_of(text) == parts


def test_without_tools_a_call_is_content():
    assert parts_of('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', ()) == [Content('{"a": 1}')]
