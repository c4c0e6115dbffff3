"""Steps that a server takes while its queue grows: what they change, and that answers name them."""

import asyncio
import json

import pytest

from moe_serve.config import load_config
from moe_serve.config.sections import DegradeStep
from moe_serve.errors import ConfigError, QueueFullError
from moe_serve.server.api.generate_request import parse_generate
from moe_serve.server.requests.admission import Degradation, Queue
from tests.server.served import in_event_loop, serving, until

STEPS = (
    DegradeStep(above=0.25, max_new_tokens=8),
    DegradeStep(above=0.5, max_new_tokens=4, max_samples=2),
    DegradeStep(above=0.75, min_priority=0),
)


def call(**fields: object):
    return parse_generate(json.dumps({"text": "a", **fields}).encode(), max_prompts=4)


def lengths(share: float, **fields: object) -> tuple[list[int], list[str]]:
    """The longest outputs of a call as it is served, and what its answer names."""
    named: list[str] = []
    served = Degradation(STEPS).apply(call(**fields), Queue(share, 1000, 100.0), named)
    return [prompt.params.max_new_tokens for prompt in served.prompts], named


@pytest.mark.parametrize("share, most, named", [
    (0.0, 128, []), (0.25, 128, []), (0.26, 8, ["max_new_tokens=8"]), (0.6, 4, ["max_new_tokens=4"]),
])  # fmt: skip
def test_a_call_that_names_no_length_is_shortened_in_steps(share, most, named):
    assert lengths(share) == ([most], named)


def test_what_a_step_is_not_about_is_served_as_it_is():
    assert lengths(1.0, sampling_params={"max_new_tokens": 50}) == ([50], [])
    assert lengths(1.0, sampling_params={"min_new_tokens": 20}) == ([20], ["max_new_tokens=4"])
    assert lengths(0.6, sampling_params={"max_new_tokens": 3, "n": 2}) == ([3], [])
    assert lengths(0.3, priority=-5, sampling_params={"max_new_tokens": 3, "n": 5}) == ([3], [])
    texts = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 30}, {}]}
    assert lengths(0.3, **texts) == ([30, 8], ["max_new_tokens=8"])


def test_low_priorities_and_many_samples_are_refused_with_the_time_until_there_is_space():
    steps, named = Degradation(STEPS), []
    with pytest.raises(QueueFullError, match=r"priority is -1, .* below 0 are refused \(server.degrade\)") as caught:
        steps.apply(call(priority=-1), Queue(1.0, 1000, 100.0), named)
    assert caught.value.retry_after_s == pytest.approx(2.5)
    assert named == ["min_priority=0"]
    with pytest.raises(QueueFullError, match=r"sampling_params.n is 3, .* at most 2 samples"):
        steps.apply(call(sampling_params={"n": 3, "max_new_tokens": 1}), Queue(0.6, 1000, None), [])
    assert steps.counts == {"max_new_tokens": 0, "min_priority": 1, "max_samples": 1}


@pytest.mark.parametrize(
    "value, message",
    [
        ("[{above: 0.5}]", "changes nothing"),
        ("[{above: 0.5, max_new_tokens: 1}, {above: 0.2, min_priority: 1}]", "rising order"),
        ("[{above: 1.5, max_new_tokens: 1}]", "less than 1"),
        ("[{above: 0.5, max_tokens: 1}]", "max_tokens: unknown setting"),
    ],
)
def test_a_step_that_cannot_be_is_refused_at_start(value: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[f"server.degrade={value}"])


@in_event_loop
async def test_answers_name_the_steps_that_changed_them_and_metrics_count_them():
    settings = (
        "engine.max_running_requests=1",
        "engine.max_queued_requests=10",
        "server.degrade=[{above: 0.1, max_new_tokens: 2}, {above: 0.2, min_priority: 0}]",
    )
    async with serving(1, *settings) as served:
        served.workers[0].go.clear()
        calls = []
        for params in ({}, {}, {}, {"max_new_tokens": 3}, {"max_new_tokens": 3}, {}):  # three go to the rank
            calls.append(asyncio.create_task(served.generate(input_ids=[7], sampling_params=params)))
            await until(lambda: len(served.bridge.book) == len(calls))
        stream = asyncio.create_task(served.generate(input_ids=[7], stream=True))
        await until(lambda: len(served.bridge.book) == len(calls) + 1)
        refused = await served.generate(input_ids=[7], priority=-1, sampling_params={"max_new_tokens": 1})
        assert refused.status_code == 429
        assert refused.headers["x-moe-serve-degraded"] == "min_priority=0"
        metrics = (await served.client.get("/metrics")).text
        assert "moe_serve_degradation_steps 2.0" in metrics
        assert 'moe_serve_degraded_calls_total{step="max_new_tokens"} 2.0' in metrics
        served.workers[0].go.set()
        answers = [await each for each in calls]
        assert [len(answer.json()["output_ids"]) for answer in answers] == [128, 128, 128, 3, 3, 2]
        named = [answer.headers.get("x-moe-serve-degraded") for answer in answers]
        assert named == [None] * 5 + ["max_new_tokens=2"]
        assert (await stream).headers["x-moe-serve-degraded"] == "max_new_tokens=2"
