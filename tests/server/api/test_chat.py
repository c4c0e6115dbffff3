"""`/v1/chat/completions` answers as OpenAI's does, in JSON and in streams. Without a model."""

import json
import os
import threading
from pathlib import Path

from moe_serve.server.api.generate import Call
from moe_serve.server.api.openai_answers import ChatAnswers
from moe_serve.server.api.openai_requests import parse_chat
from tests.conftest import _descendants
from tests.server.api.calls import CHAT, HI, TEXT, answer, post, says, stream, with_template
from tests.server.served import in_event_loop, serving

PROMPT = "<user>hi\n<assistant>"


@in_event_loop
async def test_messages_become_one_prompt_and_the_answer_is_openais_object(tmp_path: Path):
    before = set(_descendants(os.getpid()))
    async with serving(1, with_template(tmp_path), reply=says("Hello — 漢字")) as served:
        response = await post(served, CHAT, model="demo", messages=HI)
        prompt_ids = served.workers[0].submitted[0].prompt_ids
        length = served.workers[0].submitted[0].params.max_new_tokens
    answer = response.json()
    assert response.status_code == 200, response.text
    assert answer.pop("id").startswith("chatcmpl-")
    answer.pop("created")
    assert prompt_ids == TEXT.encode(PROMPT, add_special_tokens=False)
    assert length == 202 - len(prompt_ids)  # the rest of the context
    num_output = len(TEXT.encode("Hello — 漢字")) + 1
    assert answer == {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello — 漢字"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": num_output,
            "total_tokens": len(prompt_ids) + num_output,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert set(_descendants(os.getpid())) == before  # the process of the template has ended with the server


@in_event_loop
async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(tmp_path: Path):
    async with serving(1, with_template(tmp_path), reply=says("one 漢字 two")) as served:
        plain = await stream(served, CHAT, messages=HI, n=2, stream_options={"include_usage": True})
        full = await stream(
            served, CHAT, messages=HI, return_token_ids=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )  # fmt: skip
        whole = (await post(served, CHAT, messages=HI, n=2)).json()
    for index in (0, 1):
        choices = [event["choices"][0] for event in plain[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "one 漢字 two"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {event["object"] for event in plain} == {"chat.completion.chunk"}
    assert plain[-1]["usage"] == whole["usage"]
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one 漢字 two"] * 2
    assert full[0]["prompt_token_ids"] == TEXT.encode(PROMPT, add_special_tokens=False)
    ids = [token for event in full[:-1] for token in event["choices"][0].get("token_ids", [])]
    assert ids == [*TEXT.encode("one 漢字 two"), 1]
    assert full[-2]["usage"] == full[-1]["usage"]


@in_event_loop
async def test_parts_of_text_are_joined_and_the_last_message_can_go_on(tmp_path: Path):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Well,", "refusal": None}]
    async with serving(1, with_template(tmp_path)) as served:
        answers = [
            await post(served, CHAT, messages=messages, max_tokens=1, **fields)
            for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False})
        ]
        texts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    assert [answer.status_code for answer in answers] == [200, 200]
    start = "<user>one\ntwo\n<assistant>Well,"
    assert texts == [f"{start}\n<assistant>", start]


def test_a_message_with_an_empty_list_of_calls_has_none():
    """As some clients send every message; templates such as DeepSeek's ask whether there is a list."""
    said = {"role": "assistant", "content": "Hi", "tool_calls": [], "name": "", "reasoning_content": ""}
    prompt = parse_chat(json.dumps({"messages": [*HI, said]}).encode()).prompt
    assert prompt.messages[1] == {"role": "assistant", "content": "Hi", "reasoning_content": "", "thinking": ""}


MANY = json.dumps({"a": [0] * 40_000})
WRONG = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "expected a list"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
    ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "expected a string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "no images"),
    ({"messages": HI, "max_tokens": 500}, "max_tokens", "max_tokens is 500"),
    ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "max_completion_tokens is 6"),
    ({"messages": [{"role": "user", "content": "x" * 15_000}]}, "messages", "shorten"),
    ({"messages": [{"role": "user"}] * 16_385}, "messages", "16385 entries, at most 16384"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 8193}] * 2},
     "messages[].tool_calls", "16386 entries, at most 16384"),
    ({"messages": HI, "chat_template_kwargs": {"a": [[[]]] * 33_000}}, "chat_template_kwargs",
     "more than 65536 values"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": MANY}}]}] * 2},
     "messages[].tool_calls", "more than 65536 values"),
    ({"messages": HI, "documents": [{}] * 1025}, "documents", "1025 entries, at most 1024"),
    ({"messages": HI, "chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not a variable"),
    ({"messages": HI, "chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs", "not a variable"),
    ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "both true"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments", "not valid JSON"),
]  # fmt: skip


def test_a_wrong_field_is_named(tmp_path: Path):
    @in_event_loop
    async def check():
        async with serving(1, with_template(tmp_path)) as served:
            for fields, param, message in WRONG:
                response = await post(served, CHAT, **fields)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), error
                assert message in error["message"], error
            assert (await post(served, CHAT, messages=HI, model="gpt-4")).status_code == 404

    check()


def test_a_clients_template_runs_where_the_server_trusts_it(tmp_path: Path):
    @in_event_loop
    async def check():
        settings = [with_template(tmp_path), "server.trust_request_chat_template=true"]
        async with serving(1, *settings) as served:
            template = "{{ messages[0].content }}{{ mood }}{{ bos_token }}{{ reasoning_effort }}"
            response = await post(
                served, CHAT, messages=HI, chat_template=template, chat_template_kwargs={"mood": "!"},
                reasoning_effort="low", max_tokens=1,
            )  # fmt: skip
            assert response.status_code == 200, response.text
            assert TEXT.decode(served.workers[0].submitted[0].prompt_ids, False) == "hi!<|bos|>low"
            refused = await post(served, CHAT, messages=HI, chat_template="{{ raise_exception('no, thanks') }}")
            assert "no, thanks" in refused.json()["error"]["message"]
            endless = "{% for i in range(10**9) %}{% endfor %}"
            refused = await post(served, CHAT, messages=HI, chat_template=endless)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
            assert (await post(served, CHAT, messages=HI, max_tokens=1)).status_code == 200

    check()


@in_event_loop
async def test_without_a_tokenizer_the_error_says_what_to_send(tmp_path: Path):
    async with serving(1, with_template(tmp_path), "model.skip_tokenizer=true", tokenizer=False) as served:
        response = await post(served, CHAT, messages=HI)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


@in_event_loop
async def test_a_long_answer_is_read_by_parsers_beside_the_event_loop(tmp_path: Path, monkeypatch):
    threads, whole = [], ChatAnswers.whole

    def noted(self: ChatAnswers, call: Call) -> bytes:
        threads.append(threading.current_thread())
        return whole(self, call)

    monkeypatch.setattr(ChatAnswers, "whole", noted)
    async with serving(1, with_template(tmp_path), reply=says("def " * 40)) as served:
        short, long = [(await post(served, CHAT, messages=HI, n=n)).json() for n in (1, 120)]
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
    assert [choice["message"] for choice in long["choices"]] == [short["choices"][0]["message"]] * 120


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "second"}}]}


@in_event_loop
async def test_of_the_tools_only_those_that_a_call_allows_are_shown_and_called(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("first", "second")]
    template = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
    fields = {"messages": HI, "tools": tools, "max_tokens": 60}
    reply = says('[{"name": "second", "parameters": {}}]')
    async with serving(1, with_template(tmp_path, template), reply=reply) as served:
        of_chat = {"type": "allowed_tools", "allowed_tools": ALLOWED}
        message = (await answer(served, CHAT, tool_choice=of_chat, **fields))["choices"][0]["message"]
        flat = [{"type": "function", "name": name, "parameters": {}} for name in ("first", "second")]
        of_responses = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "first"}]}
        await answer(served, "/v1/responses", input="hi", tools=flat, tool_choice=of_responses, max_output_tokens=60)
        prompts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
        for wrong in ({"mode": "none"}, {"tools": []}, {"tools": [{"name": "x"}]}):
            choice = {"type": "allowed_tools", "allowed_tools": {**ALLOWED, **wrong}}
            response = await post(served, CHAT, tool_choice=choice, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice"), response.text
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["second"]
    assert prompts == ["second;", "first;"]


@in_event_loop
async def test_hints_are_taken_and_log_probabilities_may_name_tokens_by_id(tmp_path: Path):
    hints = {
        "verbosity": "low", "service_tier": "flex", "prompt_cache_retention": "24h", "store": True,
        "prediction": {"type": "content", "content": "x"}, "client_metadata": {"a": "b"}, "typical_p": 1.0,
        "guided_decoding_backend": "xgrammar", "repetition_detection": None, "custom_params": {},
        "structured_outputs": {"regex": "[a-z ]+"}, "guided_regex": "[a-z ]+",
    }  # fmt: skip
    async with serving(1, with_template(tmp_path), reply=says("one two")) as served:
        fields = {"messages": HI, "logprobs": True, "return_tokens_as_token_ids": True, **hints}
        choice = (await answer(served, CHAT, **fields))["choices"][0]
    ids = [*TEXT.encode("one two"), 1]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{each}" for each in ids]
