"""What may wait is bounded, refusals say when to come back, and they come before a body is read."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.errors import QueueFullError
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from moe_serve.server.requests.admission import Admission, DrainRate, Load
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


def test_a_full_queue_tells_strangers_nothing(monkeypatch: pytest.MonkeyPatch):
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
    async with serving(2) as served:
        for worker in served.workers:
            worker.round_s = 0.01
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
    async with serving(2) as served:
        for worker in served.workers:
            worker.round_s = 0.02
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
