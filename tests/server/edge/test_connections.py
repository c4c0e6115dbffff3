"""Connections: each wait for a client has a deadline, their number is bounded, and none keeps the others out.

Over real sockets, without a model, with deadlines made short.
"""

import asyncio
import logging
import resource
import socket

import pytest

from moe_serve.server.edge import connection
from moe_serve.server.edge.http import ConnectionTable, Listener, soft_limit
from moe_serve.server.edge.http_parser import BoundedParser
from moe_serve.server.edge.ports import open_port
from tests.server.raw_client import RawClient, header
from tests.server.served import Served, in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}
SHORT = "server.header_deadline_s=0.2", "server.body_deadline_s=0.3"


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was answered before its end waits less long for the client to close it."""
    monkeypatch.setattr(connection, "_LINGER_S", 1.0)


async def is_served(served: Served) -> bool:
    return (await served.generate(text="a", sampling_params=FIVE)).status_code == 200


@in_event_loop
async def test_sockets_that_never_finish_their_headers_are_closed():
    async with serving(2, *SHORT) as served:
        silent = [await RawClient.connect(served) for _ in range(5)]
        slow = [await RawClient.connect(served) for _ in range(5)]
        for client in slow:
            await client.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx-a: b")
        assert await is_served(served)
        assert [await client.closed() for client in silent] == [b""] * 5
        answers = [await client.answer() for client in slow]
        assert {answer.status for answer in answers} == {408}
        assert "0.2 s" in answers[0].message
        await until(lambda: len(served.server.table) <= 1)  # the well-behaved client's
        assert await is_served(served)


@in_event_loop
async def test_bytes_that_trickle_in_do_not_move_the_deadline_of_a_header():
    async with serving(2, *SHORT) as served:
        client = await RawClient.connect(served)
        for byte in header("GET /ping"):
            await client.send(bytes([byte]))
            await asyncio.sleep(0.02)
            if client.reader.at_eof() or client.reader._buffer:
                break
        assert (await client.answer()).status == 408


@in_event_loop
async def test_the_second_request_of_a_connection_has_a_deadline_too():
    async with serving(2, *SHORT) as served:
        client = await RawClient.connect(served)
        await client.send(header("GET /ping"))
        assert (await client.answer()).status == 200
        await asyncio.sleep(0.3)  # idle is no fault
        await client.send(b"GET /ping HT")
        assert (await client.answer()).status == 408


@in_event_loop
async def test_an_idle_connection_is_closed_without_a_word():
    async with serving(2, "server.idle_deadline_s=0.2") as served:
        client = await RawClient.connect(served)
        await client.send(header("GET /ping"))
        assert (await client.answer()).status == 200
        assert await client.closed() == b""


@in_event_loop
async def test_a_body_that_does_not_arrive_gets_a_408():
    async with serving(2, *SHORT) as served:
        client = await RawClient.connect(served)
        await client.send(header("POST /generate", "content-length: 100\r\n"), b'{"text":')
        answer = await client.answer()
        assert answer.status == 408
        assert "body" in answer.message
        await until(lambda: not served.server.server_state.tasks)
        assert await is_served(served)


@in_event_loop
async def test_a_new_connection_takes_the_place_of_the_oldest_silent_connection():
    async with serving(1, "server.max_connections=8", "server.max_connections_per_client=8") as served:
        silent = [await RawClient.connect(served) for _ in range(30)]
        client = await RawClient.connect(served)
        await client.send(header("GET /ping"))
        assert (await client.answer()).status == 200
        assert len(served.server.table) == 8
        assert await silent[0].closed() == b""


@in_event_loop
async def test_busy_connections_keep_their_places_and_a_new_one_gets_a_503():
    async with serving(1, "server.max_connections=4", "server.max_connections_per_client=3") as served:
        served.workers[0].go.clear()
        busy = [await RawClient.connect(served) for _ in range(3)]
        for client in busy:
            await client.post({"text": "a", "sampling_params": FIVE})
        await until(lambda: len(served.bridge.book) == 3)
        late = await RawClient.connect(served)
        answer = await late.answer()
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        served.workers[0].go.set()
        assert [(await client.answer()).status for client in busy] == [200] * 3
        assert served.server.table.num_refused == 1


def test_new_connections_do_not_make_the_server_look_at_all_busy_connections_each_time():
    looked = 0

    class Busy:
        @property
        def may_yield(self) -> bool:
            nonlocal looked
            looked += 1
            return False

    table = ConnectionTable(max_connections=100, max_per_client=60)
    for number in range(100):
        assert table.admit(Busy(), "ab"[number // 60])  # type: ignore[arg-type]
    for number in range(1000):
        assert not table.admit(Busy(), "abc"[number % 3])  # type: ignore[arg-type]
    assert table.num_refused == 1000
    assert 100 <= looked <= 1000, "once for a client at its own bound, once for all, and again after a while"


@in_event_loop
async def test_a_half_closed_client_gets_its_answer():
    async with serving(1) as served:
        served.workers[0].go.clear()
        client = await RawClient.connect(served)
        await client.post({"text": "a", "sampling_params": FIVE})
        client.writer.write_eof()
        await until(lambda: len(served.bridge.book) == 1)
        await asyncio.sleep(0.1)  # a probe or two
        served.workers[0].go.set()
        answer = await client.answer()
        assert answer.status == 200
        assert b"output_ids" in answer.body
        assert await client.closed() == b""
        stream = await RawClient.connect(served)
        await stream.post({"text": "a", "stream": True, "sampling_params": FIVE})
        stream.writer.write_eof()
        assert (await stream.answer()).body.endswith(b"data: [DONE]\n\n")


@in_event_loop
async def test_a_client_that_is_gone_has_its_requests_aborted_though_it_looks_half_closed():
    async with serving(1) as served:
        served.workers[0].go.clear()
        for stream in (False, True):
            client = await RawClient.connect(served)
            await client.post({"text": "a", "stream": stream, "sampling_params": FIVE})
            await until(lambda: len(served.bridge.book) == 1)
            await client.close()
            if stream:
                served.workers[0].go.set()
            await until(lambda: len(served.bridge.book) == 0)
        await until(lambda: len(served.server.table) == 0)


@in_event_loop
async def test_a_client_that_resets_its_connection_while_it_is_refused_is_no_error():
    class Reset(asyncio.Transport):
        """The transport of a connection that its client has reset, before the loop has heard of it."""

        aborted = False

        def write(self, data: bytes) -> None: ...

        def get_write_buffer_size(self) -> int:
            return 0

        def can_write_eof(self) -> bool:
            return True

        def write_eof(self) -> None:
            raise OSError(107, "Transport endpoint is not connected")

        def abort(self) -> None:
            self.aborted = True

        def is_closing(self) -> bool:
            return self.aborted

        def resume_reading(self) -> None: ...

    async with serving(1) as served:
        own = socket.socket()
        connection, transport = served.server._connection(), Reset({"socket": own})
        connection.connection_made(transport)
        try:
            connection.data_received(b"\x16\x03\x01 is not HTTP\r\n\r\n")
        finally:
            connection.connection_lost(OSError())
            own.close()
        assert transport.aborted


HOSTILE = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 500, 400),
    (b"GET /ping HTTP/9.9\r\nhost: localhost\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"GET /ping HTTP/1.1\r\n\r\n", 400),
    (b"GET /ping HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    (b"GET /ping HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    (b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
    (b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 300_000 + b"\r\n\r\n", 431),
    (header("POST /generate", "content-length: -1\r\n"), 400),
    (header("POST /generate", "content-length: 5\r\ncontent-length: 6\r\n"), 400),
    (header("POST /generate", "transfer-encoding: chunked\r\n") + b"zz\r\n", 400),
    (header("POST /generate", "transfer-encoding: gzip\r\n"), 400),
    (header("POST /generate", "transfer-encoding: chunked\r\n") + b"1\r\n \r\n" * 3000 + b"0\r\n\r\n", 400),
]


def test_hostile_bytes_get_one_error_in_our_form_and_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture):
    @in_event_loop
    async def check():
        async with serving() as served:
            for data, status in HOSTILE:
                client = await RawClient.connect(served)
                await client.send(data)
                answer = await client.answer()
                assert answer.status == status, (data[:60], answer)
                assert answer.message
                await client.close()
            assert await is_served(served)
            await until(lambda: len(served.server.table) <= 1)

    logging.getLogger("moe_serve").propagate = True
    with caplog.at_level(logging.WARNING):
        check()
    assert [record.getMessage() for record in caplog.records] == []


@in_event_loop
async def test_an_answer_before_the_body_is_complete_reaches_a_client_that_still_sends():
    async with serving(2, "server.max_body_mib=0.01") as served:
        client = await RawClient.connect(served)
        await client.send(header("POST /generate", "content-length: 5000000\r\n"), b" " * 4_000_000)
        assert (await client.answer()).status == 413
        await until(lambda: len(served.server.table) == 0)  # the rest never comes


@in_event_loop
async def test_what_comes_of_a_body_after_its_answer_is_not_parsed_and_the_next_request_is_served(monkeypatch):
    async with serving(1, "server.max_body_mib=0.01") as served:
        client = await RawClient.connect(served)
        await client.send(header("POST /generate", "content-length: 3000000\r\n"), b" " * 100_000)
        assert (await client.answer()).status == 413
        parsed: list[bytes] = []
        receive = BoundedParser.receive_data
        monkeypatch.setattr(
            BoundedParser, "receive_data", lambda self, data: (parsed.append(data), receive(self, data))
        )
        ping = header("GET /ping")
        await client.send(b" " * 2_900_000, ping[:20])
        await client.send(ping[20:], ping)
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert len(b"".join(parsed)) < 200_000  # what the kernel held when the answer was sent, at most
        await client.send(header("POST /generate", "content-length: 20000\r\n"), b" " * 20_000, ping)
        assert [(await client.answer()).status for _ in range(2)] == [413, 200]


@in_event_loop
async def test_a_client_that_comes_as_the_server_stops_is_not_kept_waiting():
    with open_port("127.0.0.1", 0) as listening:
        listener = Listener(
            listening, lambda: pytest.fail("it is taken"), ConnectionTable(8, 8), connection.BatchReader(), None, 1.0
        )
        running = asyncio.create_task(listener.run())
        await asyncio.sleep(0.01)
        with socket.create_connection(listening.getsockname(), timeout=5) as client:
            await asyncio.sleep(0)  # the arrival is handled after this task's next step, in the same turn
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            listening.close()
            with pytest.raises(ConnectionResetError):
                client.recv(1)


@in_event_loop
async def test_pipelined_requests_are_answered_in_order():
    async with serving() as served:
        client = await RawClient.connect(served)
        await client.send(header("GET /ping") * 50 + header("GET /nothing"))
        assert [(await client.answer()).status for _ in range(51)] == [200] * 50 + [404]


@in_event_loop
async def test_the_limit_of_descriptors_is_raised_at_start():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        async with serving(1, "server.max_connections=500", "server.max_connections_per_client=500") as served:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 628
            clients = [await RawClient.connect(served) for _ in range(200)]
            for client in clients:
                await client.send(header("GET /ping"))
            assert [(await client.answer()).status for client in clients] == [200] * 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_soft_limit_is_never_lowered_and_stays_below_the_hard_one():
    unlimited = resource.RLIM_INFINITY
    assert soft_limit(500, 1024, 4096) == 1024
    assert soft_limit(4096, 1024, 4096) == 4096
    assert soft_limit(4096, 1024, 2**20) == 4096 + 128
    assert soft_limit(4096, 1024, unlimited) == 4096 + 128
    assert soft_limit(4096, unlimited, unlimited) == unlimited
