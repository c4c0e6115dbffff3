"""`/v1/completions` answers as OpenAI's does, in JSON and in streams, with vLLM's and SGLang's fields. No model."""

import asyncio
import json

import pytest

from tests.server.api.calls import COMPLETIONS, TEXT, post, says, stream
from tests.server.served import in_event_loop, serving, until

FIVE = {"max_tokens": 5, "seed": 10}


@in_event_loop
async def test_a_text_gives_openais_object():
    async with serving(reply=says("Hello — 漢字")) as served:
        response = await post(served, COMPLETIONS, model="demo", prompt="def f", max_tokens=50)
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    num_output, num_prompt = len(TEXT.encode("Hello — 漢字")) + 1, len(TEXT.encode("def f"))
    assert answer == {
        "object": "text_completion",
        "model": "demo",
        "choices": [
            {"index": 0, "text": "Hello — 漢字", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


PROMPTS = [
    ("def f", [TEXT.encode("def f")]),
    (["def f", "class"], [TEXT.encode("def f"), TEXT.encode("class")]),
    ([5, 6, 7], [[5, 6, 7]]),
    ([[5, 6], [7]], [[5, 6], [7]]),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS, ids=["str", "[str]", "[int]", "[[int]]"])
@in_event_loop
async def test_every_form_of_prompt_is_served(prompt, ids):
    async with serving(1) as served:
        answer = (await post(served, COMPLETIONS, prompt=prompt, **FIVE)).json()
        assert [submit.prompt_ids for submit in served.workers[0].submitted] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 5 * len(ids)


@in_event_loop
async def test_a_length_is_openais_16_and_null_is_the_rest_of_the_context():
    async with serving(1) as served:
        for fields in ({}, {"max_tokens": None}, {"max_tokens": 3}, {"max_completion_tokens": 4}):
            await post(served, COMPLETIONS, prompt=[5, 6], **fields)
        lengths = [submit.params.max_new_tokens for submit in served.workers[0].submitted]
    assert lengths == [16, 200, 3, 4]


@in_event_loop
async def test_a_stream_has_the_same_text_and_usage_where_it_is_asked_for():
    async with serving(reply=says("one two 漢字 three")) as served:
        whole = (await post(served, COMPLETIONS, prompt="a", max_tokens=50)).json()
        plain = await stream(served, COMPLETIONS, prompt="a", max_tokens=50)
        with_usage = await stream(
            served, COMPLETIONS, prompt="a", max_tokens=50, stream_options={"include_usage": True}
        )
        with_all = await stream(
            served, COMPLETIONS, prompt="a", max_tokens=50, return_token_ids=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )  # fmt: skip
    for events in (plain, with_usage[:-1], with_all[:-1]):
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == "one two 漢字 three"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in plain)
    for events in (with_usage, with_all):
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
    counts = [event["usage"]["completion_tokens"] for event in with_all[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]
    ids = [token for event in with_all[:-1] for token in event["choices"][0]["token_ids"]]
    assert ids == [*TEXT.encode("one two 漢字 three"), 1]
    assert with_all[0]["choices"][0]["prompt_token_ids"] == TEXT.encode("a")


@in_event_loop
async def test_samples_and_prompts_are_choices_in_their_order_and_a_prompt_counts_once():
    fields = {"prompt": [[5], [6, 7]], "n": 2, **FIVE}
    async with serving() as served:
        whole = (await post(served, COMPLETIONS, **fields)).json()
        events = await stream(served, COMPLETIONS, stream_options={"include_usage": True}, **fields)
        native = (
            await served.generate(
                input_ids=[[5], [6, 7]], sampling_params={"n": 2, "max_new_tokens": 5, "sampling_seed": 10}
            )
        ).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [answer["text"] for answer in native]
    streamed = [
        "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"][0]["index"] == i)
        for i in range(4)
    ]
    assert streamed == texts
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 20)
    assert events[-1]["usage"] == whole["usage"]


@in_event_loop
async def test_a_stop_string_and_a_stop_token_are_named_and_an_end_of_sequence_is_not():
    async with serving(reply=says("one two three")) as served:
        string = (await post(served, COMPLETIONS, prompt="a", max_tokens=50, stop=[" two"])).json()["choices"][0]
        token = TEXT.encode("one two three")[-1]
        stop_id = (await post(served, COMPLETIONS, prompt="a", max_tokens=50, stop_token_ids=[token])).json()
    assert (string["text"], string["finish_reason"], string["stop_reason"]) == ("one", "stop", " two")
    assert stop_id["choices"][0]["stop_reason"] == token


@in_event_loop
async def test_an_id_is_the_clients_own_and_aborts_all_of_its_choices():
    async with (
        serving(reply=lambda submit: [5] * 200, round_s=0.05) as served,
        served.client.stream(
            "POST", COMPLETIONS, json={"prompt": ["a", "b"], "n": 2, "max_tokens": 150, "rid": "mine", "stream": True}
        ) as response,
    ):
        events = (json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {"))
        begun = set()
        async for event in events:  # one that had no token yet would end with an error: see the next test
            assert event["id"] == "mine"
            begun.add(event["choices"][0]["index"])
            if len(begun) == 4:
                break
        assert (await served.client.post("/abort_request", json={"rid": "mine"})).status_code == 200
        rest = [event async for event in events]
    ends = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in rest}
    assert ends == dict.fromkeys(range(4), "abort")


@in_event_loop
async def test_an_aborted_choice_without_a_token_leaves_the_others_their_ends():
    async with serving(1, reply=lambda submit: [5] * (200 if submit.prompt_ids == [6] else 0)) as served:
        body = {"prompt": [[7], [6]], "max_tokens": 150, "rid": "mine"}
        async with served.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            lines = response.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["index"] == 1
            assert (await served.client.post("/abort_request", json={"rid": "mine"})).status_code == 200
            *rest, done = [line async for line in lines if line]
        whole = asyncio.create_task(post(served, COMPLETIONS, **{**body, "prompt": [[7], [6]], "rid": "later"}))
        await until(lambda: any(each.num_output for each in served.bridge.book.with_client_id("later")))
        await served.client.post("/abort_request", json={"rid": "later"})
        answer = (await whole).json()
        await until(lambda: len(served.bridge.book) == 0)
        await until(lambda: len(served.workers[0].aborted) == 4)
    assert done == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in rest]
    ends = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert ends == {0: "abort", 1: "abort"}
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][1]["text"] != ""


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_a_call_that_is_aborted_before_any_token_fails(stream):
    async with serving(1, reply=lambda submit: []) as served:
        call = asyncio.create_task(post(served, COMPLETIONS, prompt=[[6], [7]], rid="mine", stream=stream))
        await until(lambda: len(served.workers[0].submitted) == 2)
        await served.client.post("/abort_request", json={"rid": "mine-1"})
        await asyncio.sleep(0.1)
        assert not call.done(), "the other one may still have an answer"
        await served.client.post("/abort_request", json={"rid": "mine"})
        answer = await call
    if not stream:
        assert answer.status_code == 503
        error = answer.json()["error"]
    else:
        *_, failure, _ = [line for line in answer.text.splitlines() if line]
        error = json.loads(failure.removeprefix("data: "))["error"]
    assert "aborted, and no token had come out yet" in error["message"]


@in_event_loop
async def test_a_client_that_leaves_frees_its_requests():
    async with serving(1) as served:
        served.workers[0].reply = lambda submit: [5] * 200
        async with served.client.stream(
            "POST", COMPLETIONS, json={"prompt": [[5], [6]], "max_tokens": 150, "stream": True}
        ) as response:
            await anext(response.aiter_lines())
        await until(lambda: len(served.bridge.book) == 0)


WRONG = [
    ({}, 400, "prompt", "prompt is missing"),
    ({"prompt": []}, 400, "prompt", "empty list"),
    ({"prompt": ""}, 400, "prompt", "prompt has no tokens"),
    ({"prompt": {}}, 400, "prompt", "expected a string"),
    ({"prompt": ["a", 5]}, 400, "prompt[1]", "expected a string"),
    ({"prompt": [[5], ["a"]]}, 400, "prompt[1][0]", "expected a token id"),
    ({"prompt": [5000]}, 400, "prompt", "outside the vocabulary"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model", "this server serves 'demo'"),
    ({"prompt": "a", "max_tokens": 500}, 400, "max_tokens", "max_tokens is 500"),
    ({"prompt": "a", "min_tokens": 20, "max_tokens": 10}, 400, "min_tokens", "min_tokens is 20 but max_tokens is 10"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature", "temperature is -1"),
    ({"prompt": "a", "n": 0}, 400, "n", "n is 0"),
    ({"prompt": "a", "seed": -1}, 400, "seed", "seed is -1"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params", "this server alone"),
    ({"prompt": "a", "max_new_tokens": 5}, 400, "max_new_tokens", "did you mean max_tokens"),
    ({"prompt": "a", "temprature": 1}, 400, "temprature", "did you mean temperature"),
    ({"prompt": "a", "stream_options": {"usage": True}}, 400, "stream_options.usage", "is not a field"),
    ({"prompt": ["a"] * 5000}, 400, "prompt", "at most"),
]  # fmt: skip


def test_a_wrong_field_is_named_in_openais_words_and_shape():
    @in_event_loop
    async def check():
        async with serving() as served:
            for fields, status, param, message in WRONG:
                for streams in ({}, {"stream": True}):
                    response = await post(served, COMPLETIONS, **fields, **streams)
                    error = response.json()["error"]
                    assert (response.status_code, error["code"]) == (status, status), fields
                    assert error["param"] == param, error
                    assert message in error["message"], error
                    assert error["type"] == "invalid_request_error"

    check()


@in_event_loop
async def test_known_fields_that_ask_for_nothing_pass():
    neutral = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": None, "suffix": None,
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "logprobs": None,
        "repetition_penalty": 1.0, "use_beam_search": False, "prompt_logprobs": None, "guided_json": None,
        "response_format": {"type": "text"}, "lora_path": None, "ignore_eos": True, "min_tokens": 2, "top_k": 3,
        "min_p": 0.1, "skip_special_tokens": False, "cache_salt": "x", "priority": 1, "extra_key": "y",
    }  # fmt: skip
    async with serving(1) as served:
        response = await post(served, COMPLETIONS, prompt="a", **FIVE, **neutral)
        (submit,) = served.workers[0].submitted
    assert response.status_code == 200, response.text
    params = submit.params
    assert (params.ignore_eos, params.min_new_tokens, params.top_k, params.min_p) == (True, 2, 3, 0.1)
    assert "x" in submit.salt


@in_event_loop
async def test_what_changes_logits_reaches_the_rank_and_a_wrong_value_is_named():
    given = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "repetition_penalty": 1.2, "allowed_token_ids": [5, 6]}
    async with serving(1) as served:
        fields = {**given, "logit_bias": {"7": -100}, "bad_words": ["self"], "bad_words_ids": [[9]]}
        response = await post(served, COMPLETIONS, prompt="a", **FIVE, **fields)
        beyond = await post(served, COMPLETIONS, prompt="a", **FIVE, logit_bias={"5000": 1})
        (submit,) = served.workers[0].submitted
    assert response.status_code == 200, response.text
    params = submit.params
    assert [getattr(params, name) for name in list(given)[:3]] == list(given.values())[:3]
    assert (params.logit_bias, params.allowed_token_ids) == ({7: -100.0}, (5, 6))
    words = {tuple(TEXT.encode(text, add_special_tokens=False)) for text in ("self", " self")}
    assert set(params.bad_words_ids) == {(9,), *words}
    assert params.bad_words == ()
    assert beyond.json()["error"]["param"] == "logit_bias"


@in_event_loop
async def test_a_stop_regex_and_the_stop_string_that_a_text_keeps():
    async with serving(reply=says("one two 345 six")) as served:
        fields = {"prompt": "a", "max_tokens": 50, "stop_regex": r"\d+"}
        cut = (await post(served, COMPLETIONS, **fields)).json()["choices"][0]
        kept = (await post(served, COMPLETIONS, **fields, include_stop_str_in_output=True)).json()["choices"][0]
        refused = await post(served, COMPLETIONS, **(fields | {"stop_regex": "^a"}))
    assert (cut["text"], cut["finish_reason"]) == ("one two ", "stop")
    assert kept["text"] == "one two 3"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")


@in_event_loop
async def test_a_request_that_fails_in_a_stream_is_an_error_event_and_the_last():
    async with (
        serving(1, reply=lambda submit: [5] * 200, round_s=0.02) as served,
        served.client.stream("POST", COMPLETIONS, json={"prompt": [5], "max_tokens": 150, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        served.bridge.drain()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    assert rest[-1] == "data: [DONE]"
