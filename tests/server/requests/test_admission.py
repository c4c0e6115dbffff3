"""What may wait is bounded and ordered, refusals say when to come back, and steps of a busy server are named."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config import load_config
from moe_serve.config.sections import DegradeStep
from moe_serve.errors import ConfigError, QueueFullError
from moe_serve.server.api.native import parse_generate
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from moe_serve.server.requests.admission import (
    MAX_PRIORITY,
    Admission,
    Degradation,
    DrainRate,
    Load,
    Queue,
    WaitingLine,
)
from tests.server.served import in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}


def test_the_rate_is_of_the_last_seconds_and_unknown_without_any():
    rate = DrainRate()
    assert rate.per_s(0.0) is None
    for second in range(30):
        rate.count(50, second + 0.1)
        rate.count(50, second + 0.9)
    assert rate.per_s(30.0) == pytest.approx(100, rel=0.15)
    assert rate.per_s(100.0) is None


BOUNDS = Admission(max_open=10, max_waiting_tokens=1000, deadline_s=5.0)


@pytest.mark.parametrize(
    "load, rate, retry_s",
    [
        (Load(9, 999), 200.0, None),
        (Load(10, 500), 100.0, 0.5),  # until one of ten is done
        (Load(5, 1200), 100.0, 2.01),
        (Load(5, 1200), None, 1.0),
        (Load(5, 900), 100.0, 4.0),  # it would wait 9 s
        (Load(5, 900), 0.001, 60.0),
        (Load(0, 0), None, None),
    ],
)
def test_a_refusal_says_when_there_will_be_space(load, rate, retry_s):
    refusal = BOUNDS.refusal(load, rate)
    if retry_s is None:
        assert refusal is None
    else:
        assert refusal.retry_after_s == pytest.approx(retry_s)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3000), st.booleans()), max_size=80))
def test_the_bounds_hold_whatever_comes_and_what_finds_nobody_waiting_is_let_in(calls):
    held: list[tuple[int, int]] = []
    for num_requests, num_tokens, ends in calls:
        load = Load(sum(number for number, _ in held), sum(tokens for _, tokens in held))
        refusal = BOUNDS.refusal(load, None, num_requests, num_tokens)
        if refusal is None:
            held.append((num_requests, num_tokens))
            assert sum(number for number, _ in held) <= 10
            assert len(held) == 1 or sum(tokens for _, tokens in held) <= 1000
        else:
            assert isinstance(refusal, QueueFullError)
            assert held, "nobody waits"
        if ends and held:
            held.pop(0)


@in_event_loop
async def test_a_full_queue_refuses_before_the_body_is_sent():
    async with serving(1, "engine.max_running_requests=1", "server.max_waiting_tokens=10") as served:
        served.workers[0].go.clear()
        calls = [asyncio.create_task(served.generate(input_ids=[7], sampling_params=FIVE)) for _ in range(4)]
        await until(lambda: len(served.bridge.book) == 4)
        calls.append(asyncio.create_task(served.generate(input_ids=[7] * 9, sampling_params=FIVE)))
        assert (await calls[-1]).status_code == 429  # 6 + 14 tokens
        small = asyncio.create_task(served.generate(input_ids=[7] * 3, sampling_params={"max_new_tokens": 1}))
        await until(lambda: len(served.bridge.book) == 5)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.client.base_url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 1000000\r\n\r\n")
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert b" 429 " in answer
        assert b"retry-after: " in answer.lower()
        served.workers[0].go.set()
        assert [(await call).status_code for call in calls] == [200] * 4 + [429]
        assert (await small).status_code == 200
        assert served.bridge.book.counters["num_refused"] == 2


def test_a_full_queue_tells_unauthenticated_peers_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key-of-a-client")

    @in_event_loop
    async def check():
        async with serving(1, "engine.max_running_requests=1", "engine.max_queued_requests=1") as served:
            served.workers[0].go.clear()
            body, key = {"input_ids": [7], "sampling_params": FIVE}, {"authorization": "Bearer the-key-of-a-client"}
            calls = [asyncio.create_task(served.client.post("/generate", json=body, headers=key)) for _ in range(2)]
            await until(lambda: len(served.bridge.book) == 2)
            assert (await served.client.post("/generate", json=body)).status_code == 401
            assert (await served.client.post("/generate", json=body, headers=key)).status_code == 429
            served.workers[0].go.set()
            assert [(await call).status_code for call in calls] == [200] * 2

    check()


@in_event_loop
async def test_a_pause_keeps_streams_and_they_go_on_with_the_same_tokens():
    async with serving(2, round_s=0.01) as served:
        params = {"max_new_tokens": 40, "sampling_seed": 10}
        call = asyncio.create_task(served.generate(input_ids=[7], sampling_params=params))
        await until(lambda: any(worker.submitted for worker in served.workers))
        paused = await served.client.post("/pause_generation", json={"mode": "retract"})
        assert paused.json() == {"status": "ok", "message": "Generation paused successfully."}
        later = asyncio.create_task(served.generate(input_ids=[7], sampling_params=params))
        await until(lambda: len(served.bridge.book) == 2)
        await asyncio.sleep(0.1)
        assert not call.done()
        assert sum(len(worker.running) for worker in served.workers) == 0
        assert (await served.client.post("/continue_generation")).json()["status"] == "ok"
        for each in (call, later):
            assert (await each).json()["output_ids"] == [12 + i for i in range(40)]
        wrong = await served.client.post("/pause_generation", json={"mode": "in_place"})
        assert wrong.json()["error"]["param"] == "mode"


@in_event_loop
async def test_abort_request_ends_one_its_samples_or_all():
    async with serving(2, round_s=0.02) as served:
        params = {"max_new_tokens": 200, "sampling_seed": 10}
        calls = {
            rid: asyncio.create_task(served.generate(input_ids=[7], sampling_params=params | {"n": n}, rid=rid))
            for rid, n in (("one", 1), ("two", 2), ("two-others", 1))
        }
        await until(lambda: sum(len(worker.produced) for worker in served.workers) == 4)
        await asyncio.sleep(0.1)
        assert (await served.client.post("/abort_request", json={"rid": "two"})).status_code == 200
        answers = (await calls["two"]).json()
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
        assert all(answer["output_ids"] for answer in answers)
        assert len(served.bridge.book) == 2
        assert (await served.client.post("/abort_request", json={})).json()["error"]["param"] == "rid"
        assert (await served.client.post("/abort_request", json={"abort_all": True})).status_code == 200
        for rid in ("one", "two-others"):
            assert (await calls[rid]).json()["meta_info"]["finish_reason"]["type"] == "abort"


# Who waits is served by time of arrival minus the head start of its priority; so nobody starves. Pure.


PRIORITIES = st.integers(-MAX_PRIORITY, MAX_PRIORITY)


def drained(line: WaitingLine) -> list[str]:
    return [line.pop() for _ in range(len(line))]


def test_equal_priorities_are_served_as_they_came_and_a_head_start_counts_in_seconds():
    line = WaitingLine(head_start_s=2.0)
    for name, arrival_s, priority in [("a", 0.0, 0), ("b", 1.0, 0), ("c", 3.0, 1), ("d", 3.0, 2), ("e", 1.0, -1)]:
        line.push(name, arrival_s, priority, 10)
    assert line.num_tokens == 50
    assert drained(line) == ["d", "a", "b", "c", "e"]
    assert (len(line), line.num_tokens, line.first_due_s()) == (0, 0, float("inf"))


def test_without_head_starts_priorities_mean_nothing():
    line = WaitingLine(head_start_s=0.0)
    line.push("a", 1.0, -5, 1)
    line.push("b", 2.0, 100, 1)
    assert drained(line) == ["a", "b"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), PRIORITIES, st.integers(1, 3)), max_size=60), PRIORITIES)
def test_nobody_is_overtaken_after_the_longest_head_start(others, own):
    """One request against a flood that never ends: it leaves within a time that no flood can lengthen."""
    line = WaitingLine(head_start_s=0.5)
    line.push("own", 0.0, own, 1)
    now_s, num_ahead = 0.0, 0
    flood = others or [(1.0, MAX_PRIORITY, 1)]
    for turn in range(10_000):
        gap_s, priority, count = flood[turn % len(flood)]
        for each in range(count):
            line.push(f"{turn}.{each}", now_s, priority, 1)
        num_ahead += count if now_s < (priority - own) * 0.5 else 0
        if line.pop() == "own":
            assert turn <= num_ahead
            return
        now_s += gap_s + 0.05
    raise AssertionError("it starved")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.floats(0, 100), PRIORITIES, st.integers(0, 5000)),
            st.tuples(st.just("pop")),
            st.tuples(st.just("remove"), st.integers(0, 200)),
        ),
        max_size=200,
    )
)
def test_the_line_is_a_sorted_list_and_its_memory_is_bounded(actions):
    line, model = WaitingLine(1.0), {}
    for number, action in enumerate(actions):
        if action[0] == "push":
            _, arrival_s, priority, num_tokens = action
            line.push(str(number), arrival_s, priority, num_tokens)
            model[str(number)] = (arrival_s - priority, number, num_tokens)
        elif action[0] == "remove":
            line.remove(str(action[1]))
            model.pop(str(action[1]), None)
        elif model:
            first = min(model, key=model.__getitem__)
            assert line.first_due_s() == model[first][0]
            assert line.pop() == first
            del model[first]
        assert len(line) == len(model)
        assert line.num_tokens == sum(entry[2] for entry in model.values())
        assert len(line._heap) <= 2 * len(line) + 65
    assert drained(line) == sorted(model, key=model.__getitem__)


# Steps that a server takes while its queue grows: what they change, and that answers name them.


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
