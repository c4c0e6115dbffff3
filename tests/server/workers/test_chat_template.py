"""Chat templates: what transformers makes of them, from whichever file; and a hostile one ends in time and in memory.

The templates are small ones in the manner of well-known families, each with what is peculiar to it.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from moe_serve.config import load_config
from moe_serve.errors import ConfigError, RequestError
from moe_serve.server.api.messages import ChatPrompt
from moe_serve.server.workers.chat_template import ChatTemplates, RenderJob
from moe_serve.server.workers.chat_template_process import render
from tests.conftest import _descendants

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MIXTRAL = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', first=true) -%}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system ~ message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}
{%- for tool in message['tool_calls'] %}
{{- '<|tool call begin|>' + tool['type'] + '<|tool sep|>' + tool['function']['name'] + '\\n```json\\n'
    + tool['function']['arguments'] + '\\n```<|tool call end|>' }}
{%- endfor %}{{- eos_token }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' + content + eos_token }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{- '<|tool output|>' + message['content'] + '<|tool output end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}"""
DEEPSEEK_R1 = """{{ bos_token }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<|tool call begin|>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '<|tool call end|>' }}
{%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<|Assistant|>' + message['content'] + eos_token }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{- '<|tool output|>' + message['content'] + '<|tool output end|>' }}{%- endif %}
{%- endfor %}"""
GPT_OSS = """{%- macro typed(param) -%}
    {%- if param.type == "array" -%}{{- typed(param['items']) ~ "[]" -}}{%- else -%}{{- param.type -}}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " }}
{{- reasoning_effort | default("medium") }}{{- "<|end|>" }}
{%- if tools %}{{- "<|start|>developer<|message|>namespace functions {\\n" }}
{%- for tool in tools %}{%- set tool = tool.function %}
{{- "type " ~ tool.name ~ " = (_: {" }}
{%- for name, param in tool.parameters.properties.items() %}
{{- "\\n" ~ name ~ ("?" if name not in tool.parameters.required else "") ~ ": " ~ typed(param) ~ "," }}
{%- endfor %}{{- "\\n}) => any;\\n" }}
{%- endfor %}{{- "}<|end|>" }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message -%}
            {%- if message.thinking -%}{{- "<|channel|>analysis<|message|>" + message.thinking }}{%- endif %}
            {%- set call = message.tool_calls[0].function -%}{%- set last.name = call.name -%}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments|tojson }}{{- "<|call|>" }}
        {%- else -%}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none -%}{{- raise_exception("a tool role, but no tool call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + "<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" }}{%- endif -%}"""
TEMPLATES = {
    "Qwen3": QWEN3, "Mixtral": MIXTRAL, "DeepSeek": DEEPSEEK, "DeepSeek-R1": DEEPSEEK_R1, "gpt-oss": GPT_OSS,
}  # fmt: skip

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says "<b>how</b>" it is — 天気',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "number"}}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1]}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "  Héllo <|im_end|> & <b>\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi!"},
    {"role": "user", "content": "Bye"},
]
CALLED: list[dict[str, Any]] = [
    *TURNS,
    {"role": "assistant", "content": "", "reasoning_content": "so", "thinking": "so", "tool_calls": [CALL]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "1"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TURNS]
CASES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (TURNS[:1], {}),
    (TURNS, {}),
    (TURNS, {"add_generation_prompt": False}),
    (SYSTEM, {}),
    (CALLED, {"tools": TOOLS}),
    (TURNS, {"kwargs": {"enable_thinking": False, "reasoning_effort": "high"}}),
    (TURNS[:2], {"add_generation_prompt": False, "continue_final_message": True}),
]


def job(template: str, messages: list[dict[str, Any]], **fields: Any) -> RenderJob:
    defaults: dict[str, Any] = {
        "tools": None, "documents": None, "add_generation_prompt": True, "continue_final_message": False,
        "special_tokens": TOKENS, "kwargs": {}, "max_chars": 100_000,
    }  # fmt: skip
    return RenderJob(template=template, is_own=True, messages=messages, **{**defaults, **fields})


def of_transformers(asked: RenderJob, messages: list[dict[str, Any]]) -> str:
    texts, _ = render_jinja_template(
        [messages],
        tools=asked.tools,
        chat_template=asked.template,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **asked.special_tokens,
        **asked.kwargs,
    )
    return texts[0]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_it_gives_in_transformers(name, case):
    messages, fields = CASES[case]
    asked = job(TEMPLATES[name], messages, **fields)
    rendered = render(asked)
    if name.startswith("DeepSeek") and messages is CALLED:  # it wants the arguments of calls as text
        text = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
        called = {**CALL, "function": {**CALL["function"], "arguments": text}}
        content = None if name == "DeepSeek-R1" else ""  # which a client may send for either
        messages = [*messages[:-2], {**messages[-2], "content": content, "tool_calls": [called]}, messages[-1]]
    if rendered.text is None:
        with pytest.raises((TemplateError, ValueError)) as caught:
            of_transformers(asked, messages)
        assert str(caught.value)[:30] in rendered.message or asked.continue_final_message
    else:
        assert rendered.text == of_transformers(asked, messages)


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek"])
def test_a_developer_is_the_system_where_the_template_knows_none(name):
    messages = [{**SYSTEM[0], "role": "developer"}, *TURNS]
    assert "Be brief." in (render(job(TEMPLATES[name], messages)).text or "")
    assert render(job(TEMPLATES[name], messages)) == render(job(TEMPLATES[name], SYSTEM))
    assert "<|start|>developer<|message|>Be brief." in (render(job(GPT_OSS, messages)).text or "")


def test_messages_that_a_template_refuses_are_refused_in_its_words():
    rendered = render(job(MIXTRAL, [TURNS[0], TURNS[0]]))
    assert "roles must alternate" in rendered.message
    assert "'a' is undefined" in render(job("{{ a.b.c }}", TURNS)).message
    assert "does not take" in render(job("{% if %}", TURNS)).message  # what is no template


HOSTILE = {
    "a range": "{% for i in range(10**9) %}{% endfor %}",
    "a text that doubles": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a format": "{{ '{:>10000000000}'.format('a') }}",
    "centred": "{{ 'a' | center(10**10) }}",
    "much text": "{% for i in range(99999) %}aaaaaaaaaa{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__.os }}",
    "a namespace's insides": "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n.__init__.__globals__ }}",
    "a change of the input": "{{ messages.append(1) }}",
}


def test_a_hostile_template_ends_with_a_reason_and_the_next_one_is_served():
    async def check() -> None:
        templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {}, trust_requests=True)
        before = set(_descendants(os.getpid()))
        try:
            for name, template in HOSTILE.items():
                with pytest.raises(RequestError) as caught:
                    print(name, await templates.render(prompt(template), 10_000))
                assert caught.value.field == "messages", name
            assert await templates.render(prompt(None), 10_000) == "hi"
            assert len(set(_descendants(os.getpid())) - before) == 2, "one for long jobs"
        finally:
            await templates.close()
        assert not set(_descendants(os.getpid())) - before

    asyncio.run(check())


def prompt(template: str | None = None, tools: list[dict[str, Any]] | None = None) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": "hi"}], tools, None, template, True, False, False, {})


def test_a_number_that_never_ends_is_ended_from_outside():
    async def check() -> None:
        templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {}, trust_requests=True)
        try:
            assert await templates.render(prompt(None), 10_000) == "hi"
            process = templates._processes._first
            process._deadline_s = 1.0  # from now on, since starting takes long on a busy machine
            with pytest.raises(RequestError, match="longer than"):
                await templates.render(prompt("{{ 7 ** (7 ** 12) }}"), 10_000)  # one operation, which nothing stops
            process._deadline_s = 60.0
            assert await templates.render(prompt(None), 10_000) == "hi"
        finally:
            await templates.close()

    asyncio.run(check())


def rendered_from(folder: Path, *overrides: str, tools: list[dict[str, Any]] | None = None) -> str | None:
    templates = ChatTemplates.load(load_config(overrides=[f"model.path={folder}", *overrides]))
    return render(templates.job(prompt(tools=tools), 1000)).text


def test_a_template_is_found_where_transformers_finds_it(tmp_path: Path):
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"}
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(RequestError, match="no chat template; send a prompt to /v1/completions"):
        rendered_from(tmp_path)
    config.write_text(json.dumps(settings))
    assert rendered_from(tmp_path) == "<s>one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps(settings | {"chat_template": named}))
    assert rendered_from(tmp_path) == "two"
    assert rendered_from(tmp_path, tools=TOOLS) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert rendered_from(tmp_path) == "four"
    (tmp_path / "own").write_text("five{{ eos_token }}")
    assert rendered_from(tmp_path, f"server.chat_template={tmp_path / 'own'}", tools=TOOLS) == "five"
    with pytest.raises(ConfigError, match=r"server\.chat_template: .*nothing"):
        ChatTemplates.load(load_config(overrides=[f"server.chat_template={tmp_path / 'nothing'}"]))


def test_the_time_of_a_template_is_bounded_by_what_it_computes(monkeypatch):
    monkeypatch.setattr("moe_serve.server.workers.chat_template._MAX_CORE_S", 0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    async def check() -> None:
        templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {}, trust_requests=True)
        try:
            with pytest.raises(RequestError, match=r"takes longer than 0\.05 s"):
                await templates.render(prompt(endless), 10_000)
            assert await templates.render(prompt(None), 10_000) == "hi"
        finally:
            await templates.close()

    asyncio.run(check())


def test_a_template_of_the_server_is_compiled_outside_of_the_time_of_the_first_chat(monkeypatch):
    monkeypatch.setattr("moe_serve.server.workers.chat_template._SHORT_S", 0.01)
    monkeypatch.setattr("moe_serve.server.workers.chat_template._MAX_CORE_S", 0.01)

    async def check() -> None:
        own = "{% if false %}" + "{{ messages[0].role }}" * 400 + "{% endif %}{{ messages[0].content }}"
        templates = ChatTemplates({"default": own}, {}, trust_requests=True)
        try:
            with pytest.raises(RequestError, match="takes longer than"):
                await templates.render(prompt(own), 10_000, "a client's own, the same")
            assert await templates.render(prompt(None), 10_000) == "hi"
        finally:
            await templates.close()

    asyncio.run(check())
