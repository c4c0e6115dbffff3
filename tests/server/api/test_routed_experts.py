"""Clients that ask for the experts of their tokens get them at the end, in one form on all routes. No model."""

import base64

import numpy as np
import pytest

from tests.server.api.calls import CHAT, COMPLETIONS, post, says, stream
from tests.server.served import in_event_loop, serving

ASKS = {"return_routed_experts": True}


def those_of(found: dict, num_tokens: int) -> None:
    """Checks that these are the experts of so many tokens."""
    rows = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
    assert rows.tolist() == [[[position, 1], [2, 3]] for position in range(num_tokens)]


@in_event_loop
async def test_generate_has_them_in_meta_info_of_the_whole_and_of_the_last_event():
    async with serving(1) as served:
        params = {"max_new_tokens": 5, "sampling_seed": 7}
        answer = (await served.generate(input_ids=[5, 6, 7], sampling_params=params, **ASKS)).json()
        those_of(answer["meta_info"]["routed_experts"], 3 + 5 - 1)
        batch = {"input_ids": [[5], [6, 7]], "sampling_params": params, "return_routed_experts": [False, True]}
        plain, asking = (await served.generate(**batch)).json()
        assert "routed_experts" not in plain["meta_info"]
        those_of(asking["meta_info"]["routed_experts"], 2 + 5 - 1)
        events = await stream(served, "/generate", input_ids=[5, 6, 7], sampling_params=params, **ASKS)
    assert all("routed_experts" not in event["meta_info"] for event in events[:-1])
    those_of(events[-1]["meta_info"]["routed_experts"], 3 + 5 - 1)


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": "def f"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})]
)
@in_event_loop
async def test_openais_choices_have_them_when_they_end(path: str, prompt: dict):
    async with serving(1, reply=says("one two three")) as served:
        answer = (await post(served, path, **prompt, max_tokens=50, stop="three", **ASKS)).json()
        events = await stream(served, path, **prompt, max_tokens=50, stop="three", **ASKS)
        plain = (await post(served, path, **prompt, max_tokens=5)).json()
    num_tokens = answer["usage"]["total_tokens"] - 1  # the stop string ends it here, before the rank
    those_of(answer["choices"][0]["routed_experts"], num_tokens)
    those_of(events[-1]["choices"][0]["routed_experts"], num_tokens)
    assert all("routed_experts" not in event["choices"][0] for event in events[:-1])
    assert "routed_experts" not in plain["choices"][0]


@in_event_loop
async def test_what_is_no_flag_is_refused_by_name():
    async with serving(1) as served:
        for path in ("/generate", COMPLETIONS):
            prompt = {"text": "a"} if path == "/generate" else {"prompt": "a"}
            response = await post(served, path, **prompt, return_routed_experts="yes")
            assert response.status_code == 400
            assert "return_routed_experts" in response.json()["error"]["message"]


@in_event_loop
async def test_generate_says_how_many_choices_the_capacity_of_experts_has_changed():
    async with serving(1) as served:
        plain = (await served.generate(input_ids=[5], sampling_params={"max_new_tokens": 2})).json()
        served.workers[0].num_changed = 7
        limited = (await served.generate(input_ids=[5], sampling_params={"max_new_tokens": 2})).json()
    assert "experts_over_capacity" not in plain["meta_info"]
    assert limited["meta_info"]["experts_over_capacity"] == 7
