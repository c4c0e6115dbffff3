"""SIGTERM: open requests end, new ones get 503, and a rolling restart behind a load balancer loses nothing."""

import asyncio
import contextlib

import httpx
import pytest

from moe_serve.engine.protocol.messages import Draining
from moe_serve.server.edge import http
from tests.server.fake_worker import FakeWorker
from tests.server.raw_client import RawClient, header
from tests.server.served import Served, in_event_loop, serving, until

PARAMS = {"max_new_tokens": 30, "sampling_seed": 10}
OUTPUT = [12 + i for i in range(30)]


@in_event_loop
async def test_a_drain_finishes_what_runs_and_what_waits_and_refuses_the_rest():
    async with serving(2, "engine.max_running_requests=1") as served:
        calls = [
            asyncio.create_task(served.generate(input_ids=[7], sampling_params=PARAMS, stream=bool(i % 2)))
            for i in range(12)
        ]
        await until(lambda: len(served.bridge.book) == 12)
        served.server.drain()
        await asyncio.sleep(0)
        refused = await served.generate(input_ids=[7])
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server is ending")
        assert refused.headers["retry-after"]
        assert (await served.client.get("/ready")).status_code == 503
        assert (await served.client.get("/health")).status_code == 200
        for i, response in enumerate(await asyncio.gather(*calls)):
            assert response.status_code == 200
            assert "error" not in response.text
            assert i % 2 or response.json()["output_ids"] == OUTPUT
        await until(lambda: served.server.should_exit)


@in_event_loop
async def test_a_drain_ends_a_pause_and_finishes_what_it_held():
    async with serving(2) as served:
        paused = await served.client.post("/pause_generation", json={"mode": "retract"})
        assert paused.status_code == 200, paused.text
        call = asyncio.create_task(served.generate(input_ids=[7], sampling_params=PARAMS))
        await until(lambda: len(served.bridge.book) == 1)
        served.server.drain()
        assert (await call).json()["output_ids"] == OUTPUT


@in_event_loop
async def test_what_does_not_end_by_the_deadline_ends_with_an_error():
    async with serving(2, "server.drain_deadline_s=0.1") as served:
        served.hold()
        call = asyncio.create_task(served.generate(input_ids=[7]))
        await until(lambda: len(served.bridge.book) == 1)
        served.server.drain()
        assert (await call).status_code == 503
        assert "the server is ending" in (await call).text


def test_what_is_still_open_after_all_deadlines_ends_with_503_or_a_cut_and_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(http, "_END_DEADLINE_S", 0.1)

    @in_event_loop
    async def check():
        async with serving(1) as served:
            monkeypatch.setattr(served.bridge, "drain", lambda: None)  # as if nothing ended the calls
            plain, stream = [await RawClient.connect(served) for _ in range(2)]
            await stream.post({"input_ids": [7], "sampling_params": {**PARAMS, "max_new_tokens": 100}, "stream": True})
            assert await stream.reader.readuntil(b"data: ")
            served.workers[0].go.clear()
            await plain.post({"input_ids": [7], "sampling_params": PARAMS})
            await until(lambda: len(served.bridge.book) == 2)
            served.server.stop()
            answer = await plain.answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert b"the server is ending" in answer.body
            with contextlib.suppress(ConnectionResetError):
                assert not (await stream.reader.read()).endswith(b"0\r\n\r\n"), "not as if it were complete"

    check()
    assert "Traceback" not in caplog.text
    of_http = [record.getMessage() for record in caplog.records if "rank" not in record.name]
    assert of_http == ["Cancel 2 running task(s), timeout graceful shutdown exceeded"]


def test_a_second_request_to_end_cancels_what_is_open_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    @in_event_loop
    async def check():
        async with serving(1) as served:
            monkeypatch.setattr(served.bridge, "drain", lambda: None)  # as if nothing ended the call
            client = await RawClient.connect(served)
            served.workers[0].go.clear()
            await client.post({"input_ids": [7], "sampling_params": PARAMS})
            await until(lambda: len(served.bridge.book) == 1)
            served.server.stop()
            served.server.stop()

    check()
    assert "Traceback" not in caplog.text


@in_event_loop
async def test_while_draining_every_answer_asks_its_client_to_close_the_connection():
    async with serving(2) as served:
        served.hold()
        plain, stream, idle = [await RawClient.connect(served) for _ in range(3)]
        await plain.post({"input_ids": [7], "sampling_params": PARAMS})
        await stream.post({"input_ids": [7], "sampling_params": PARAMS, "stream": True})
        await idle.send(header("GET /health"))
        assert "connection" not in (await idle.answer()).headers
        await until(lambda: len(served.bridge.book) == 2)
        served.server.drain()
        new = await RawClient.connect(served)
        for client in (idle, new):
            await client.post({"input_ids": [7]})
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert await client.closed() == b""
        served.go_on()
        answer = await plain.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        answer = await stream.answer()
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        for client in (plain, stream):
            assert await client.closed() == b""


@in_event_loop
async def test_a_rank_that_is_asked_to_end_ends_all_once_open_requests_have_ended_and_others_may_come():
    async with serving(2) as served:
        served.hold()
        calls = [asyncio.create_task(served.generate(input_ids=[7], sampling_params=PARAMS)) for _ in range(4)]
        await until(lambda: sum(len(worker.running) for worker in served.workers) == 4)
        for _ in range(2):  # a rank repeats it
            served.workers[1].say(Draining(1, 0))
        await until(lambda: served.bridge.problem() is not None)
        assert "rank 1 on testhost was asked to end" in (await served.generate(input_ids=[7])).text
        assert (await served.client.get("/ready")).status_code == 503
        assert not any(worker.was_shut_down for worker in served.workers)
        served.go_on()
        assert [(await call).json()["output_ids"] for call in calls] == [OUTPUT] * 4
        await until(lambda: all(worker.was_shut_down for worker in served.workers))
        await until(lambda: served.bridge.workers.loss is not None)
        assert not served.server.should_exit, "the front end waits for other ranks"
        others = [FakeWorker(rank, 2, served.bridge.link.port, launch_id=1) for rank in range(2)]
        tasks = [asyncio.create_task(worker.run()) for worker in others]
        await until(lambda: served.bridge.problem() is None)
        assert (await served.generate(input_ids=[7], sampling_params=PARAMS)).json()["output_ids"] == OUTPUT
        served.tasks.extend(tasks)


@in_event_loop
async def test_ranks_that_are_asked_to_end_do_so_at_the_deadline():
    async with serving(2, "server.drain_deadline_s=0.1") as served:
        served.hold()
        call = asyncio.create_task(served.generate(input_ids=[7]))
        await until(lambda: len(served.bridge.book) == 1)
        served.workers[0].say(Draining(0, 0))
        assert (await call).status_code == 503
        assert "open after server.drain_deadline_s = 0.1 s" in (await call).text
        await until(lambda: all(worker.was_shut_down for worker in served.workers))


class Balancer:
    """A load balancer of a few lines: the next system that answers, unless it says 503 or cannot be reached."""

    def __init__(self, systems: list[Served]):
        self.systems = systems
        self._turn = 0

    async def generate(self, **fields: object) -> httpx.Response:
        while True:
            self._turn += 1
            served = self.systems[self._turn % len(self.systems)]
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(base_url=served.client.base_url, trust_env=False, timeout=30) as client:
                    response = await client.post("/generate", json=fields)
                    if response.status_code != 503:
                        return response
            await asyncio.sleep(0.005)


@in_event_loop
async def test_a_rolling_restart_behind_a_load_balancer_loses_nothing():
    async with contextlib.AsyncExitStack() as stack:
        systems = [await stack.enter_async_context(serving(1)) for _ in range(2)]
        balancer = Balancer(systems)
        answers: list[httpx.Response] = []
        is_over = False

        async def client() -> None:
            while not is_over:
                answers.append(await balancer.generate(input_ids=[7], sampling_params=PARAMS))

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for index in range(2):
            await until(lambda before=len(answers): len(answers) > before + 8)
            systems[index].server.drain()
            await until(lambda old=systems[index]: old.server.should_exit)
            systems[index] = await stack.enter_async_context(serving(1))
        await until(lambda before=len(answers): len(answers) > before + 8)
        is_over = True
        await asyncio.gather(*clients)
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert all(answer.json()["output_ids"] == OUTPUT for answer in answers)
